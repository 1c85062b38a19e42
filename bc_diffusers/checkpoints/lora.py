"""LoRA files of the Wan family: PEFT, diffusers and Kohya names; merged into the weights or written as an adapter."""

import re
from dataclasses import dataclass

import torch

from .files import Checkpoint, CheckpointError
from .keys import kohya_module, module_to_diffusers


_FACTOR = re.compile(r"(.+)\.lora_(A|B|down|up)(?:\.\w+)?\.weight")  # PEFT names the adapter in the middle
_PARTS = {"A": "down", "B": "up"}


@dataclass
class LoraFactors:
    """weight += scale * up @ down, with down [rank, in] and up [out, rank]."""

    down: torch.Tensor
    up: torch.Tensor
    alpha: float | None = None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def delta(self) -> torch.Tensor:
        """float32 [out, in]."""
        return self.scale * (self.up.float() @ self.down.float())


def read_lora(checkpoint: Checkpoint, alpha: float | None = None) -> dict[str, LoraFactors]:
    """The factors by diffusers' module name.

    Args:
        alpha (`float`, *optional*): scales by alpha / rank; wins over what the file says. Files of the PEFT format do
            not say it and are taken as alpha = rank.

    Raises:
        CheckpointError: listing every key that belongs to no known module or has no partner.
    """
    tensors = {**checkpoint.tensors, **checkpoint.lora}
    found: dict[str, dict[str, torch.Tensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        match = _FACTOR.fullmatch(key)
        module, part = (match[1], match[2]) if match else (key.removesuffix(".alpha"), "alpha")
        name = _diffusers_module(module)
        if name is None or match is None and not key.endswith(".alpha"):
            unknown.append(key)
        else:
            found.setdefault(name, {})[_PARTS.get(part, part)] = tensor
    unpaired = [name for name, parts in found.items() if not {"down", "up"} <= set(parts)]
    if unknown or unpaired or not found:
        lines = [f"{checkpoint.path} is not a LoRA for a Wan transformer"]
        lines += [f"unexpected: {key}" for key in unknown] + [f"one factor only: {name}" for name in unpaired]
        raise CheckpointError("\n  ".join(lines))
    result = {}
    for name, parts in found.items():
        own = float(parts["alpha"]) if "alpha" in parts else None
        result[name] = LoraFactors(parts["down"], parts["up"], own if alpha is None else alpha)
    return result


def _diffusers_module(module: str) -> str | None:
    module = kohya_module(module)
    return module if ".attn1." in module or ".attn2." in module or ".ffn.net." in module else \
        module_to_diffusers(module)


def adapter_state(factors: dict[str, LoraFactors]) -> dict[str, torch.Tensor]:
    """The tensors of a diffusers LoRA file (`pipe.load_lora_weights`); the scale is put into the up factors, because
    such a file does not say alpha."""
    state = {}
    for name, lora in factors.items():
        up = lora.up if lora.scale == 1.0 else (lora.up.float() * lora.scale).to(lora.up.dtype)
        state[f"transformer.{name}.lora_A.weight"] = lora.down.contiguous()
        state[f"transformer.{name}.lora_B.weight"] = up.contiguous()
    return state
