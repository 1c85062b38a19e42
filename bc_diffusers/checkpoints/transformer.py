"""A checkpoint's tensors as the weights of a diffusers WanTransformer3DModel: checked to the last key."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from diffusers.utils import logging

from .files import Checkpoint, CheckpointError, open_checkpoint
from .keys import is_computed, key_to_diffusers, layout_of
from .lora import LoraFactors, read_lora


class KeyMismatch(CheckpointError):
    """The checkpoint and the model do not have the same keys and shapes; the message lists every difference.

    Attributes:
        missing, unexpected (`list[str]`): keys.
        misshaped (`dict[str, tuple]`): key -> (shape in the checkpoint, shape in the model).
    """

    def __init__(self, source, headline: str, missing: list[str], unexpected: list[str], misshaped: dict):
        self.missing, self.unexpected, self.misshaped = missing, unexpected, misshaped
        lines = [f"{source} does not fit the model: {len(missing)} keys missing, {len(unexpected)} unexpected, "
                 f"{len(misshaped)} of another shape{headline}"]
        lines += [f"missing: {key}" for key in missing] + [f"unexpected: {key}" for key in unexpected]
        lines += [f"shape: {key} is {list(got)}, the model has {list(want)}" for key, (got, want) in misshaped.items()]
        super().__init__("\n  ".join(lines))


class TransformerWeights:
    """The weights of one transformer under diffusers' names. A tensor is merged and cast when it is asked for, so
    that only one at a time is in memory.

    Args:
        checkpoint: from `open_checkpoint`.
        lora (`dict`, *optional*): factors to merge, by module.
        dtype (`torch.dtype`, *optional*): to cast to; modules that diffusers keeps in float32 become float32. `None`
            leaves every tensor as it is stored.
    """

    def __init__(self, checkpoint: Checkpoint, lora: dict[str, LoraFactors] | None = None,
                 dtype: torch.dtype | None = None):
        self.path, self.dtype, self.lora = checkpoint.path, dtype, lora or {}
        layout = layout_of(checkpoint.tensors)
        if layout is None:
            if checkpoint.lora:
                raise CheckpointError(f"{checkpoint.path} is a LoRA: give it as `lora`, with the checkpoint that it "
                                      "belongs to")
            first = ", ".join(list(checkpoint.tensors)[:5])
            raise CheckpointError(f"{checkpoint.path} is no transformer of the Wan family (its keys: {first}, ...)")
        self.unexpected, self._tensors = [], {}
        for key, tensor in checkpoint.tensors.items():
            name = key if layout == "diffusers" else key_to_diffusers(key)
            if is_computed(key):
                continue
            if name is None:
                self.unexpected.append(key)
            else:
                self._tensors[name] = tensor
        self.check_lora(self.lora)

    def check_lora(self, factors: dict[str, LoraFactors]) -> None:
        """Raises a CheckpointError that lists every factor that fits no weight."""
        wrong = []
        for module, lora in factors.items():
            weight = self._tensors.get(f"{module}.weight")
            shape = (lora.up.shape[0], lora.down.shape[1])
            if weight is None or tuple(weight.shape) != shape or lora.up.shape[1] != lora.rank:
                wrong.append(f"{module}: {list(lora.up.shape)} x {list(lora.down.shape)} for "
                             f"{'no weight' if weight is None else list(weight.shape)}")
        if wrong:
            raise CheckpointError("\n  ".join([f"the LoRA does not fit {self.path}", *wrong]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].shape

    def target_dtype(self, name: str) -> torch.dtype:
        if self.dtype is None:
            return self._tensors[name].dtype
        kept = any(part in WanTransformer3DModel._keep_in_fp32_modules for part in name.split("."))
        return torch.float32 if kept else self.dtype

    def load(self, name: str) -> torch.Tensor:
        tensor, lora = self._tensors[name], self.lora.get(name.removesuffix(".weight"))
        if lora is not None and name.endswith(".weight"):
            tensor = (tensor.float() + lora.delta()).to(tensor.dtype)
        return tensor.to(self.target_dtype(name)).contiguous()

    def nbytes(self, name: str) -> int:
        return self.shape(name).numel() * self.target_dtype(name).itemsize

    def progress_bar(self):
        """Counts bytes; silent where diffusers' progress bars are."""
        return logging.tqdm(total=sum(map(self.nbytes, self)), unit="B", unit_scale=True, desc="transformer")

    def config(self, base: dict | None = None) -> dict:
        """The transformer's config as the shapes tell it. Heads cannot be told from shapes: they come from `base`, or
        are 128 wide as in every published Wan."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        try:
            width, channels, *patch = shapes["patch_embedding.weight"]
            layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks."))
            head_dim = (base or {}).get("attention_head_dim", 128)
            has_image = "blocks.0.attn2.add_k_proj.weight" in shapes
            config = {
                "patch_size": patch, "in_channels": channels, "attention_head_dim": head_dim, "num_layers": layers,
                "out_channels": shapes["proj_out.weight"][0] // math.prod(patch),
                "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
                "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
                "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
                "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
                "num_attention_heads": width // head_dim,
                "image_dim": shapes["condition_embedder.image_embedder.norm1.weight"][0] if has_image else None,
                "added_kv_proj_dim": width if has_image else None,
            }
            position = shapes.get("condition_embedder.image_embedder.pos_embed")
            config["pos_embed_seq_len"] = None if position is None else position[1]
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{self.path} lacks weights that say the model's size ({error}): give a base folder "
                                  "with the transformer's config.json to see all that is missing") from None
        if width % head_dim:
            raise CheckpointError(f"{self.path}: the model is {width} wide, no multiple of heads of {head_dim}: give "
                                  "a base folder with the transformer's config.json")
        return config


def empty_transformer(config: dict) -> WanTransformer3DModel:
    """Parameters on the meta device, the rotary tables (which no checkpoint holds) real."""
    with init_empty_weights(include_buffers=False):
        return WanTransformer3DModel.from_config(config)


def check_keys(weights: TransformerWeights, model: WanTransformer3DModel) -> None:
    """Raises `KeyMismatch`, listing every difference."""
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    missing = [name for name in expected if name not in set(weights)]
    unexpected = weights.unexpected + [name for name in weights if name not in expected]
    misshaped = {name: (tuple(weights.shape(name)), tuple(expected[name])) for name in weights
                 if name in expected and weights.shape(name) != expected[name]}
    if missing or unexpected or misshaped:
        raise KeyMismatch(weights.path, _size_difference(weights, model), missing, unexpected, misshaped)


def _size_difference(weights: TransformerWeights, model: WanTransformer3DModel) -> str:
    try:
        own = weights.config(dict(model.config))
    except CheckpointError:
        return ""
    sizes = [(c["num_layers"], c["num_attention_heads"] * c["attention_head_dim"]) for c in (own, model.config)]
    if sizes[0] == sizes[1]:
        return ""
    return (f" (it has {sizes[0][0]} layers of width {sizes[0][1]}, the base folder's transformer {sizes[1][0]} of "
            f"width {sizes[1][1]}: is it the base of this checkpoint's size?)")


def load_transformer(path: str | Path, *, base_config: dict | None = None, weights: str | None = None,
                     lora: str | Path | None = None, lora_alpha: float | None = None,
                     dtype: torch.dtype | None = None) -> WanTransformer3DModel:
    """The transformer of an original or a diffusers checkpoint, in memory.

    Memory: tensors that need no cast and no merge stay mapped from the file; the others are made one after the other.

    Args:
        path: a `.pt` or `.safetensors` file or a diffusers folder; told apart by its content.
        base_config (`dict`, *optional*): the config that the checkpoint must fit; by default read off its shapes.
        weights (`str`, *optional*): `"generator_ema"` (preferred where there is one), `"generator"`, ...
        lora, lora_alpha (*optional*): a LoRA file to merge, and its alpha where it is not the rank.
        dtype (`torch.dtype`, *optional*): as `from_pretrained(dtype=)`; default: as stored.

    Raises:
        KeyMismatch, CheckpointError: see there.
    """
    opened = open_weights(path, weights, lora, lora_alpha, dtype)
    model = empty_transformer(base_config or opened.config())
    check_keys(opened, model)
    with opened.progress_bar() as bar:
        state = {}
        for name in opened:
            state[name] = opened.load(name)
            bar.update(opened.nbytes(name))
    model.load_state_dict(state, strict=True, assign=True)
    return model.requires_grad_(False).eval()


def open_weights(path, weights: str | None = None, lora=None, lora_alpha: float | None = None,
                 dtype: torch.dtype | None = None) -> TransformerWeights:
    """The weights, with a LoRA (from `lora`, or lying in the checkpoint itself) to be merged."""
    checkpoint = open_checkpoint(path, weights)
    factors = {}
    if lora is not None:
        factors = read_lora(open_checkpoint(lora), lora_alpha)
    if checkpoint.lora and checkpoint.tensors:
        if factors:
            raise CheckpointError(f"{path} holds LoRA factors of its own: it cannot take {lora} as well")
        factors = read_lora(Checkpoint(checkpoint.path, None, {}, checkpoint.lora), lora_alpha)
    return TransformerWeights(checkpoint, factors, dtype)
