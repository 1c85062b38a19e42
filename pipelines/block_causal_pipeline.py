"""BlockCausalVideoPipeline: autoregressive video generation with stock diffusers models."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers import DiffusionPipeline, FlowMatchLCMScheduler
from diffusers.loaders import WanLoraLoaderMixin
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
from diffusers.video_processor import VideoProcessor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..attention import CallShape, choose_backend
from ..distributed import ProcessGrid
from ..models import BlockCausalAdapter, VideoFormat, adapter_class_for
from .context_parallel import agree_on_noise, check_shared, share_video
from .picture import picture_to_pixels
from .placement import PlacementMixin
from .resources import PAGE_SIZE, ResourceStock, RolloutGeometry, check_size
from .rollout_config import FIELDS, PRESETS, RolloutConfig, resolve_rollout_config
from .stream import StreamRequest, VideoStream
from .streaming_decoder import StreamingDecoder
from .vae_support import encode_frame, make_streaming_decoder, scale_factors


OUTPUT_TYPES = ("np", "pt", "pil", "latent")

_NO_PRESET = (
    "this model does not say how it rolls out (it is not marked autoregressive): pass preset=, one of "
    f"{', '.join(PRESETS)}, for the checkpoint whose weights it holds. A bidirectional model gives poor videos "
    "with any of them."
)
_TWO_TRANSFORMERS = (
    "this model has two transformers, one for high and one for low noise (transformer_2, as in Wan 2.2 A14B): they "
    "would need two histories, which is not supported. Models with a single transformer are."
)


def _check_text_to_video(config) -> None:
    given, made = config.get("in_channels"), config.get("out_channels")
    if given is not None and made is not None and given != made:
        raise ValueError(f"the transformer takes {given} channels and makes {made}: it is an image-to-video model and "
                         "wants its picture in extra channels. Take the text-to-video model; `image=` works with it")


class BlockCausalVideoPipeline(PlacementMixin, DiffusionPipeline, WanLoraLoaderMixin):
    """Text-to-video with an autoregressive ("block-causal") transformer through an exact paged K/V cache.

    A chunk of latent frames is denoised in a few passes, attending to the sink frames, a sliding window of finished
    frames and itself; a clean pass writes its keys and values into the cache; its frames are decoded and handed out;
    and so on, endlessly if asked.

    Loads a model's stock folder or repository (with `preset=`), a folder it saved itself, or another pipeline
    (`from_pipe`). The transformer stays stock: a stock pipeline that shares it gives the same bits as before.

    Args:
        tokenizer, text_encoder: as in the model's own pipeline; `None` where it has no text encoder, or for use with
            `prompt_embeds` alone.
        vae (`AutoencoderKLWan` or a decoder with the interface of `StreamingDecoder`): turns latents into frames.
        scheduler: any; replaced by a `FlowMatchLCMScheduler` with the rollout's shift.
        transformer: a diffusers transformer with an adapter (see `bc_diffusers.models`).
        preset (`str`, *optional*): how the checkpoint rolls out, one of `PRESETS` (docs/presets.md). Required for
            folders that do not say it themselves.
        chunk_frames, window_frames, sink_frames, denoising_sigmas, first_chunk_sigmas, shift, context_noise,
        clean_block_frames, rope_mode, max_sequence_length, default_height, default_width, default_fps (*optional*):
            single fields of `RolloutConfig`, which override the preset's.
    """

    # Forwards are captured in CUDA graphs and replayed (on CUDA, without offloading). Set it to False for a
    # transformer that makes its own graphs (`compile(mode="reduce-overhead")`).
    cuda_graphs = True
    model_cpu_offload_seq = "text_encoder->transformer"
    _optional_components = ["tokenizer", "text_encoder"]
    # Without the VAE, which decodes after every chunk: in turns with the transformer both would move each time.
    _exclude_from_cpu_offload = ["vae"]
    _callback_tensor_inputs = ["latents", "prompt_embeds"]

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text_encoder: PreTrainedModel,
        vae: ModelMixin,
        scheduler: FlowMatchLCMScheduler,
        transformer: ModelMixin,
        preset: str | None = None,
        chunk_frames: int | None = None,
        window_frames: int | None = None,
        sink_frames: int | None = None,
        denoising_sigmas: list[float] | None = None,
        first_chunk_sigmas: list[float] | None = None,
        shift: float | None = None,
        context_noise: float | None = None,
        clean_block_frames: int | None = None,
        rope_mode: str | None = None,
        max_sequence_length: int | None = None,
        default_height: int | None = None,
        default_width: int | None = None,
        default_fps: int | None = None,
        adapter_options: dict | None = None,
    ):
        super().__init__()
        values = locals()
        rollout = resolve_rollout_config(preset, {name: values[name] for name in FIELDS})
        if rollout is None:
            raise ValueError(_NO_PRESET)
        if transformer is None:
            raise ValueError("this folder has no transformer (its model_index.json names none)")
        _check_text_to_video(transformer.config)
        self.rollout: RolloutConfig = rollout
        if not isinstance(scheduler, FlowMatchLCMScheduler):
            scheduler = FlowMatchLCMScheduler(shift=rollout.shift)
        elif scheduler.config.shift != rollout.shift:
            scheduler = FlowMatchLCMScheduler.from_config(scheduler.config, shift=rollout.shift)
        self.register_modules(tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, scheduler=scheduler,
                              transformer=transformer)
        self.register_to_config(preset=preset, adapter_options=adapter_options or {}, **rollout.to_dict())
        self._adapter_class = adapter_class_for(type(transformer).__name__)
        self._callback_tensor_inputs = ["latents", *self._adapter_class.forward_conditions]
        self.lora_state_dict = self._adapter_class.lora_loader.lora_state_dict  # load_lora_weights calls it
        self._stock = ResourceStock()
        self._interrupt = False
        self.vae_scale_factor_temporal, self.vae_scale_factor_spatial = scale_factors(vae)
        self.video_processor = VideoProcessor(vae_scale_factor=self.vae_scale_factor_spatial)

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
            raise ValueError(f"{pretrained_model_name_or_path}: {_NO_PRESET}")
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
                                 **kwargs) -> "BlockCausalVideoPipeline":
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

    @property
    def _adapter(self):
        video = VideoFormat(self.rollout.default_fps, self.vae_scale_factor_temporal, self.vae_scale_factor_spatial)
        return self._adapter_class(self.transformer, video, self.config.adapter_options)

    @property
    def interrupt(self) -> bool:
        """Set `pipe._interrupt = True` (from a callback, say) to end a rollout after the current pass."""
        return self._interrupt

    # ------------------------------------------------------------------------------------------------ text
    def encode_prompt(self, prompt: str, max_sequence_length: int | None = None, device: torch.device | None = None,
                      dtype: torch.dtype | None = None) -> torch.Tensor:
        """Text embeddings [1, tokens, text_dim] as the model's own pipeline makes them; `stream` takes them as
        `prompt_embeds`.

        Args:
            prompt (`str`): cut to `max_sequence_length` tokens.
            max_sequence_length (`int`, *optional*): defaults to the rollout's.

        Raises:
            ValueError: for a model whose text does not come as embeddings.
        """
        conditions = self._adapter.encode_prompt(
            prompt, self.tokenizer, self.text_encoder, num_frames=None, height=self.rollout.default_height,
            width=self.rollout.default_width, max_tokens=max_sequence_length or self.rollout.max_sequence_length,
            device=device or self._execution_device, dtype=dtype or self._compute_dtype)
        return self._adapter_class.embeds_from_conditions(conditions)

    def _encode_conditions(self, prompt, prompt_embeds, max_sequence_length, geometry: RolloutGeometry,
                           num_frames: int | None) -> dict:
        self._check_prompt(prompt, prompt_embeds)
        return self._conditions(prompt, prompt_embeds, max_sequence_length, geometry, num_frames)

    def _conditions(self, prompt, prompt_embeds, max_sequence_length, geometry, num_frames, negative=False) -> dict:
        if prompt_embeds is not None:
            embeds = prompt_embeds.to(geometry.device, geometry.dtype)
            return self._adapter_class.conditions_from_embeds(self.transformer.config, embeds)
        scale = self.vae_scale_factor_spatial
        return self._adapter.encode_prompt(
            prompt, self.tokenizer, self.text_encoder, max_tokens=max_sequence_length, height=geometry.height * scale,
            width=geometry.width * scale, num_frames=num_frames, device=geometry.device, dtype=geometry.dtype,
            negative=negative)

    def _encode_negative(self, scale: float, prompt: str | None, prompt_embeds: torch.Tensor | None,
                         max_sequence_length: int, geometry: RolloutGeometry, num_frames: int | None) -> dict | None:
        """The conditions of guidance's second branch; `None` at scale 1, where there is none."""
        if not isinstance(scale, (int, float)) or not 1 <= scale < float("inf"):
            raise ValueError(f"`guidance_scale` must be a number of at least 1 (1: no guidance), got {scale!r}")
        if prompt is not None and not isinstance(prompt, str):
            raise TypeError(f"`negative_prompt` must be one string, got {type(prompt).__name__}")
        if scale == 1:
            if prompt is not None or prompt_embeds is not None:
                raise ValueError("a negative prompt has no effect without guidance: give `guidance_scale` above 1")
            return None
        if prompt is not None and prompt_embeds is not None:
            raise ValueError("give either `negative_prompt` or `negative_prompt_embeds`, not both")
        return self._conditions(prompt or "", prompt_embeds, max_sequence_length, geometry, num_frames, negative=True)

    @property
    def _compute_dtype(self) -> torch.dtype:
        """The transformer's; for weights in a quantized type the text encoder's."""
        dtype = self.transformer.dtype
        if dtype in (torch.float32, torch.bfloat16, torch.float16):
            return dtype
        return torch.bfloat16 if self.text_encoder is None else self.text_encoder.dtype

    # ------------------------------------------------------------------------------------------------ checks
    def _check_prompt(self, prompt, prompt_embeds) -> None:
        if (prompt is None) == (prompt_embeds is None):
            raise ValueError("give either `prompt` or `prompt_embeds`, not both and not neither")
        if isinstance(prompt, (list, tuple)):
            raise ValueError(f"a stream is one video and takes one prompt, got a list of {len(prompt)}: start one "
                             "stream a prompt, or call the pipeline with the list")
        if prompt is not None and not isinstance(prompt, str):
            raise TypeError(f"`prompt` must be a string, got {type(prompt).__name__}")
        if prompt is not None and not prompt.strip():
            raise ValueError("`prompt` is empty: say what the video shows")
        if prompt_embeds is not None:
            self._adapter_class.conditions_from_embeds(self.transformer.config, prompt_embeds)

    def check_inputs(self, height: int, width: int, output_type: str = "np",
                     callback_on_step_end_tensor_inputs=("latents",)) -> None:
        """Raises a ValueError that names the nearest size that works, or what else is allowed."""
        _, patch_height, patch_width = self._adapter_class.patch_size(self.transformer.config)
        for name, value, patch in (("height", height, patch_height), ("width", width, patch_width)):
            check_size(name, value, self.vae_scale_factor_spatial * patch)
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"`output_type` must be one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}")
        unknown = [name for name in callback_on_step_end_tensor_inputs if name not in self._callback_tensor_inputs]
        if unknown:
            raise ValueError(f"`callback_on_step_end_tensor_inputs` knows {self._callback_tensor_inputs}, "
                             f"not {unknown}")

    def _check_latents(self, latents: torch.Tensor, geometry: RolloutGeometry, latent_frames: int | None) -> None:
        channels = self._adapter_class.latent_channels(self.transformer.config)
        shape = [1, channels, latent_frames or latents.shape[2], geometry.height, geometry.width]
        if list(latents.shape) != shape:
            raise ValueError(f"`latents` (the noise of all chunks) must be {shape}, got {list(latents.shape)}")
        if not latents.is_floating_point():
            raise ValueError(f"`latents` must be floating point, got {latents.dtype}")
        if latents.device != geometry.device:
            raise ValueError(f"`latents` are on {latents.device}, the pipeline runs on {geometry.device}")

    # ------------------------------------------------------------------------------------------------ generation
    def stream(
        self,
        prompt: str | None = None,
        *,
        num_chunks: int | None = None,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        latents: torch.Tensor | None = None,
        image: "PIL.Image.Image | np.ndarray | torch.Tensor | None" = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt: str | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        guidance_scale: float = 1.0,
        output_type: str = "np",
        max_sequence_length: int | None = None,
        attention_backend: str = "auto",
        parity: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: tuple[str, ...] | list[str] = ("latents",),
    ) -> VideoStream:
        """Starts a rollout and hands out its chunks as they are made.

        Args:
            prompt (`str`): or `prompt_embeds` [1, tokens, text_dim].
            num_chunks (`int`, *optional*): how many chunks; `num_frames`, pixel frames, is the other way to say it.
                Neither: endless.
            height, width (`int`, *optional*): pixels; default to the model's own.
            generator (`torch.Generator`, *optional*), seed (`int`, *optional*): where the noise comes from. A chunk's
                noise depends on the seed and its number alone. A generator gives the seed (and advances).
            latents (`torch.Tensor`, *optional*): [1, C, f, h, w], the initial noise of all chunks at once. The noise
                between passes is then drawn in order, as [frames, C, h, w] in the dtype of `latents`, from
                `generator`, from `seed`, or from torch's global state: as Self-Forcing draws it.
            image (*optional*): a picture that becomes the first frame: a PIL image, an array [H, W, 3] or a tensor
                [3, H, W], uint8 or in [0, 1]; resized to `height` x `width`. The rest of the first chunk is made
                around it.
            guidance_scale (`float`, *optional*, defaults to 1): above 1, classifier-free guidance against
                `negative_prompt` (or `negative_prompt_embeds`, as `prompt_embeds`; default: the empty text), with a
                second cache and twice the passes. Distilled models do without, and 1 costs nothing.
            output_type (`str`, *optional*, defaults to `"np"`): `"np"`, `"pt"`, `"pil"` or `"latent"`.
            attention_backend (`str`, *optional*, defaults to `"auto"`): see `block_causal_attention`.
            parity (`bool`, *optional*, defaults to `False`): round as the model's original code does (Wan; slower).
                Only for comparing videos with it: diffusers' roundings, the default, are the finer ones.
            attention_kwargs (`dict`, *optional*): `{"scale": ...}` for LoRA.
            callback_on_step_end: `callback(pipe, step, timestep, kwargs)` after each denoising pass; may return new
                `latents` and `prompt_embeds`.

        Returns:
            [`VideoStream`]: an iterator of [`VideoChunk`]s. Two streams may be alive at once; each has its own cache.
        """
        height = self.rollout.default_height if height is None else height
        width = self.rollout.default_width if width is None else width
        self._check_prompt(prompt, prompt_embeds)
        self.check_inputs(height, width, output_type, callback_on_step_end_tensor_inputs)
        length = self.rollout.max_sequence_length if max_sequence_length is None else max_sequence_length
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"`max_sequence_length` must be a whole number of at least 1, got {length!r}")
        group = self._adapter.ulysses_group()
        geometry = dataclasses.replace(self._geometry(height, width, length), parity=parity,
                                       head_shards=1 if group is None else group.degree)
        self._check_backend(attention_backend, geometry)
        latent_frames, pixel_frames = self._count_frames(num_chunks, num_frames, latents)
        if latents is not None:
            self._check_latents(latents, geometry, latent_frames)
            latent_frames = latents.shape[2]
        if seed is not None and generator is not None:
            raise ValueError("give either `seed` or `generator`, not both")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"`generator` must be one torch.Generator, got {type(generator).__name__}")
        if generator is not None and generator.device.type not in ("cpu", geometry.device.type):
            raise ValueError(f"`generator` is on {generator.device}, the pipeline runs on {geometry.device}: use a "
                             "generator of that device or of the CPU")
        if latents is not None and seed is not None:
            generator = torch.Generator(geometry.device).manual_seed(seed)
        # All that can still be refused comes before the generator is asked.
        first_latents = None if image is None else self._encode_image(image, height, width, geometry)
        conditions = self._encode_conditions(prompt, prompt_embeds, length, geometry, num_frames)
        negative_conditions = self._encode_negative(guidance_scale, negative_prompt, negative_prompt_embeds, length,
                                                    geometry, num_frames)
        if group is not None:
            check_shared(group, geometry, self._adapter_class.layer_geometry(self.transformer.config), latent_frames)
        base_seed = self._base_seed(seed, generator) if latents is None else 0
        if group is not None:
            base_seed, latents, generator = agree_on_noise(group, geometry.device, base_seed, latents, generator)
        request = StreamRequest(
            geometry=geometry, first_latents=first_latents, conditions=conditions,
            sigmas={first: self._shifted_sigmas(self.rollout.sigmas_for(int(not first))) for first in (True, False)},
            seed=base_seed, latent_frames=latent_frames, pixel_frames=pixel_frames, output_type=output_type,
            has_frames=group is None or group.rank == 0, generator=generator, latents=latents,
            backend=attention_backend, max_sequence_length=length, attention_kwargs=attention_kwargs,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=tuple(callback_on_step_end_tensor_inputs),
            guidance_scale=guidance_scale, negative_conditions=negative_conditions)
        return VideoStream(self, request)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        output_type: str = "np",
        return_dict: bool = True,
        **kwargs,
    ) -> WanPipelineOutput | tuple:
        """Generates whole videos: `stream` joined. Takes `stream`'s arguments; a list of prompts is generated one
        after the other.

        Args:
            num_frames (`int`, *optional*): pixel frames; any count, also not 4k + 1. Default: what `num_chunks` or
                `latents` say, else 81.

        Returns:
            [`~diffusers.pipelines.wan.pipeline_output.WanPipelineOutput`] with `frames` as `WanPipeline` gives them
            (`"np"` [B, F, H, W, 3], `"pt"` [B, F, 3, H, W], `"pil"` lists, `"latent"` [B, C, f, h, w]), or a tuple.
        """
        if isinstance(prompt, (list, tuple)) and not prompt:
            raise ValueError("`prompt` is an empty list")
        prompts = prompt if isinstance(prompt, (list, tuple)) else [prompt]
        generators = generator if isinstance(generator, list) else [generator] * len(prompts)
        if len(generators) != len(prompts):
            raise ValueError(f"got {len(generators)} generators for {len(prompts)} prompts")
        for text in prompts:  # all of them before the first video is made
            self._check_prompt(text, prompt_embeds)
        if num_frames is None and kwargs.get("num_chunks") is None and kwargs.get("latents") is None:
            num_frames = 81
        videos = []
        for text, own_generator in zip(prompts, generators):
            with self.stream(text, num_frames=num_frames, height=height, width=width, generator=own_generator,
                             prompt_embeds=prompt_embeds, output_type=output_type, **kwargs) as chunks:
                videos.append([chunk.frames for chunk in chunks])
        if videos and any(frames is None for video in videos for frames in video):  # another rank has them
            frames = None
        elif output_type == "pil":
            frames = [[image for chunk in video for image in chunk] for video in videos]
        elif output_type == "np":
            frames = np.stack([np.concatenate(video) for video in videos])
        elif output_type == "pt":
            frames = torch.stack([torch.cat(video) for video in videos])
        else:
            frames = torch.cat([torch.cat(video, 2) for video in videos])
        return WanPipelineOutput(frames=frames) if return_dict else (frames,)

    def enable_context_parallel(self, ulysses_degree: int = 1) -> ProcessGrid:
        """Shares every video among `ulysses_degree` processes of an `accelerate launch` (or torchrun): heads, and with
        them the K/V cache, inside the attentions, tokens between them. All processes call this and then start the
        same streams with the same arguments; each group's first rank decodes, `frames` are `None` on the others. The
        transformer stays whole for a stock pipeline that shares it.

        diffusers' own `transformer.enable_parallelism` works too, before or after this pipeline is made; there,
        lengths that do not divide are refused.

        Args:
            ulysses_degree (`int`, *optional*, defaults to 1): divides the processes and the model's heads. 1: every
                process makes videos of its own.

        Returns:
            [`ProcessGrid`]: its `share(prompts)` are this group's part of a list.

        Raises:
            ValueError: for a degree that does not work; the message names those that do.
        """
        return share_video(self, ulysses_degree)

    def free_caches(self) -> None:
        """Frees the pools (and graphs) of finished streams; those of streams that are alive stay with them."""
        self._stock.free()

    # ------------------------------------------------------------------------------------------------ of a request
    def _geometry(self, height: int, width: int, max_sequence_length: int) -> RolloutGeometry:
        scale, config = self.vae_scale_factor_spatial, self.transformer.config
        height, width = height // scale, width // scale
        tokens = self._adapter_class.tokens_per_frame(config, height, width)
        return RolloutGeometry(self.rollout, height, width, tokens, self._compute_dtype,
                               torch.device(self._execution_device),
                               self._adapter_class.max_prompt_tokens(config, max_sequence_length))

    def _check_backend(self, backend: str, geometry: RolloutGeometry) -> None:
        layers = self._adapter_class.layer_geometry(self.transformer.config)
        shards = geometry.head_shards
        choose_backend(backend, CallShape(geometry.device, geometry.dtype, layers.num_heads // shards,
                                          layers.num_kv_heads // shards, layers.head_dim, PAGE_SIZE))

    def _count_frames(self, num_chunks, num_frames, latents) -> tuple[int | None, int | None]:
        """(latent frames, pixel frames) of the request; None where it is endless or not cut."""
        if num_chunks is not None and num_frames is not None:
            raise ValueError("give either `num_chunks` or `num_frames`, not both")
        for name, value in (("num_chunks", num_chunks), ("num_frames", num_frames)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}")
        if num_chunks is not None:
            return num_chunks * self.rollout.chunk_frames, None
        if num_frames is not None:
            return -(-(num_frames - 1) // self.vae_scale_factor_temporal) + 1, num_frames
        return None, None

    def _shifted_sigmas(self, sigmas: tuple[float, ...]) -> list[float]:
        scheduler = FlowMatchLCMScheduler.from_config(self.scheduler.config)
        scheduler.set_timesteps(sigmas=list(sigmas), device="cpu")
        return scheduler.sigmas[:-1].tolist()

    def _base_seed(self, seed: int | None, generator: torch.Generator | None) -> int:
        if seed is not None:
            return int(seed)
        device = "cpu" if generator is None else generator.device
        return int(torch.randint(2**62, (1,), generator=generator, device=device))

    def _encode_image(self, image, height: int, width: int, geometry: RolloutGeometry) -> torch.Tensor:
        """The picture as a normalised latent frame [1, C, 1, h, w]."""
        pixels = picture_to_pixels(image, height, width, self.video_processor)
        return encode_frame(self.vae, pixels.to(geometry.device))

    def _make_decoder(self) -> StreamingDecoder:
        return make_streaming_decoder(self.vae)
