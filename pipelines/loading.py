"""How a pipeline comes to be: from folders, repositories, original checkpoints and other pipelines."""

from typing import Self

import torch
from transformers import AutoTokenizer

from ..models import BlockCausalAdapter, adapter_class_for
from .rollout_config import FIELDS, PRESETS, resolve_rollout_config


NO_PRESET = (
    "this model does not say how it rolls out (it is not marked autoregressive): pass preset=, one of "
    f"{', '.join(PRESETS)}, for the checkpoint whose weights it holds. A bidirectional model gives poor videos "
    "with any of them."
)
_TWO_TRANSFORMERS = (
    "this model has two transformers, one for high and one for low noise (transformer_2, as in Wan 2.2 A14B): they "
    "would need two histories, which is not supported. Models with a single transformer are."
)


def check_text_to_video(config) -> None:
    given, made = config.get("in_channels"), config.get("out_channels")
    if given is not None and made is not None and given != made:
        raise ValueError(f"the transformer takes {given} channels and makes {made}: it is an image-to-video model and "
                         "wants its picture in extra channels. Take the text-to-video model; `image=` works with it")


class LoadingMixin:
    """The ways to make a `BlockCausalVideoPipeline`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """As `DiffusionPipeline.from_pretrained`; see the class for `preset` and the rollout's single fields.

        Raises:
            ValueError: before any weight is loaded, if the folder does not say how it rolls out and no `preset` is
                given, if the preset is unknown, or if there is no adapter for its transformer.
        """
        hub = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
        config = cls.load_config(pretrained_model_name_or_path, **{k: kwargs[k] for k in hub if k in kwargs})
        if kwargs.get("preset") is not None:
            for name in FIELDS:  # a preset that is asked for replaces what the folder says
                kwargs.setdefault(name, None)
        known = {**config, **kwargs}
        if resolve_rollout_config(known.get("preset"), {name: known.get(name) for name in FIELDS}) is None:
            raise ValueError(f"{pretrained_model_name_or_path}: {NO_PRESET}")
        adapter = cls.check_model_index(pretrained_model_name_or_path, config, kwargs.get("transformer"))
        if "adapter_options" not in config:  # the model's own folder
            kwargs.setdefault("adapter_options", adapter.options_from(config))
        for ours, theirs in adapter.component_names.items():
            if ours not in config and ours not in kwargs and config.get(theirs, (None,))[0] is not None:
                # Its own pipeline calls this component otherwise, so DiffusionPipeline would not find it.
                kwargs[ours] = AutoTokenizer.from_pretrained(
                    pretrained_model_name_or_path, subfolder=theirs, **{k: kwargs[k] for k in hub if k in kwargs})
        pipe = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        pipe._keep_unused(config)
        return pipe

    @staticmethod
    def check_model_index(name, index: dict, transformer=None) -> type[BlockCausalAdapter]:
        """The adapter for a model by its `model_index.json`, or for `transformer`, given in place of the model's own.

        Raises:
            ValueError: for a model that this pipeline cannot run, before anything of it is loaded.
        """
        if (index.get("transformer_2") or (None, None))[1] is not None:
            raise ValueError(f"{name}: {_TWO_TRANSFORMERS}")
        if transformer is not None:
            return adapter_class_for(type(transformer).__name__)
        _, kind = index.get("transformer") or (None, None)
        if kind is None:
            raise ValueError(f"{name} has no transformer in its model_index.json")
        return adapter_class_for(kind)

    def _keep_unused(self, config: dict) -> None:
        """What a stock pipeline's config says and we have no use for is kept for the way back, as diffusers does it
        (`WanPipeline.from_pipe` reads `_expand_timesteps`)."""
        unused = {name: value for name, value in config.items()
                  if name not in self.config and not isinstance(value, (list, tuple))}
        self.register_to_config(**{f"_{name.removeprefix('_')}": value for name, value in unused.items()})

    @classmethod
    def from_original_checkpoint(cls, checkpoint, base, *, preset: str | None = None, weights: str | None = None,
                                 lora=None, lora_alpha: float | None = None, dtype: torch.dtype | None = None,
                                 **kwargs) -> Self:
        """A pipeline with the transformer of an original checkpoint (Self-Forcing, CausVid, LongLive, Causal-Forcing).

        Args:
            checkpoint (`str` or `Path`): a `.pt` or `.safetensors` file; its layout is told by its keys.
            base (`str` or `Path`): a stock Wan folder or repository of the same size, for all the rest.
            preset (`str`): how the checkpoint rolls out.
            weights (`str`, *optional*): which model of a file of several; default: `generator_ema`, else `generator`.
            lora, lora_alpha (*optional*): a LoRA file to merge, and its alpha if it is not the rank.
            dtype (`torch.dtype`, *optional*): default: as stored.
            kwargs: further arguments of `from_pretrained`.

        Raises:
            CheckpointError: if the checkpoint is none, or does not fit the base (every difference is listed).
        """
        from ..checkpoints import load_transformer
        from ..checkpoints.convert import base_folder, transformer_config

        folder = base_folder(base)
        transformer = load_transformer(checkpoint, base_config=transformer_config(folder), weights=weights, lora=lora,
                                       lora_alpha=lora_alpha, dtype=dtype)
        return cls.from_pretrained(folder, transformer=transformer, preset=preset, dtype=dtype, **kwargs)

    @classmethod
    def from_pipe(cls, pipeline, **kwargs):
        """A pipeline that shares the components of `pipeline`, in the dtypes that they have: both go on working.

        Args:
            pipeline (`DiffusionPipeline`): a stock one of a supported family, or one of our own.
            kwargs: components to replace, `preset` and the rollout's single fields; `dtype` casts what is shared.
        """
        if getattr(pipeline, "transformer_2", None) is not None:
            raise ValueError(_TWO_TRANSFORMERS)
        dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", None))
        config = dict(pipeline.config)
        adapter = adapter_class_for(type(kwargs.get("transformer", pipeline.transformer)).__name__)
        if "adapter_options" not in config:
            kwargs.setdefault("adapter_options", adapter.options_from(config))
        if kwargs.get("preset") is None:  # a preset that is asked for replaces what the pipeline says
            for name in ("preset", "adapter_options", *FIELDS):
                kwargs.setdefault(name, config.get(name))
        for name in ("tokenizer", "text_encoder", "vae", "scheduler", "transformer"):
            theirs = name if name in pipeline.components else adapter.component_names.get(name)
            kwargs.setdefault(name, pipeline.components.get(theirs))
        # Not DiffusionPipeline's own: it shares a component only if its class is the very one that __init__ names, and
        # casts all to float32 unless told otherwise.
        pipe = cls(**kwargs)
        pipe._keep_unused(config)
        return pipe if dtype is None else pipe.to(dtype=dtype)

    @classmethod
    def _maybe_expand_t2v_lora_for_i2v(cls, transformer, state_dict):
        if "image_dim" not in transformer.config:  # this step of load_lora_weights is for transformers that see images
            return state_dict
        return super()._maybe_expand_t2v_lora_for_i2v(transformer, state_dict)
