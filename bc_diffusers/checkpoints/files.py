"""Opens checkpoint files without copying them into memory, and finds the generator's weights in them."""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch

from .keys import clean_key, is_lora_key


# What trainers call the weights in a file of several, best first. A file without such names is the weights itself.
WEIGHT_NAMES = ("generator_ema", "generator", "model_ema", "model", "state_dict")
LORA_NAMES = ("generator_lora",)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors of one model, their storage still in the file (memory-mapped).

    Attributes:
        path: where they came from.
        weights: the name in the file that was taken (`"generator_ema"`), `None` for a file of one model.
        tensors: by key without wrapper prefixes, LoRA factors left out.
        lora: LoRA factors that lie among the tensors, by key without wrapper prefixes.
    """

    path: Path
    weights: str | None
    tensors: dict[str, torch.Tensor]
    lora: dict[str, torch.Tensor]


def open_checkpoint(path: str | Path, weights: str | None = None) -> Checkpoint:
    """Opens a `.pt` or `.safetensors` file, or a diffusers folder (of a pipeline or of its transformer).

    Args:
        path: told apart by its content, not by its name.
        weights (`str`, *optional*): which of a file's models; by default the first of `WEIGHT_NAMES` that it has.

    Raises:
        CheckpointError: if the file is no checkpoint, holds more than tensors, or has no such weights.
        FileNotFoundError: if there is no such file.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    content = _read_folder(path) if path.is_dir() else _read_file(path)
    name, tensors = _choose(path, content, weights)
    cleaned: dict[str, torch.Tensor] = {}
    origin: dict[str, str] = {}
    for key, tensor in tensors.items():
        short = clean_key(key)
        if short in cleaned:
            raise CheckpointError(f"{path}: {origin[short]} and {key} are both {short} once wrapper prefixes are "
                                  "stripped")
        cleaned[short], origin[short] = tensor, key
    _refuse_quantized(path, cleaned)
    lora = {key: tensor for key, tensor in cleaned.items() if is_lora_key(key)}
    return Checkpoint(path, name, {k: t for k, t in cleaned.items() if k not in lora}, lora)


def _read_folder(path: Path) -> dict[str, torch.Tensor]:
    folder = path / "transformer" if (path / "transformer").is_dir() else path
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if indices:
        names = sorted(set(json.loads(indices[0].read_text())["weight_map"].values()))
        files = [folder / name for name in names]
        lost = [str(file) for file in files if not file.exists()]
        if lost:
            raise CheckpointError(f"{indices[0]} names files that are not there: {', '.join(lost)}")
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(_read_file(file))
    return tensors


def _read_file(path: Path) -> dict:
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the checkpoint: fetch it with `git lfs pull`")
    if head.startswith((b"PK", b"\x80")):
        return _read_torch(path, mmap=head.startswith(b"PK"))
    try:
        with safetensors.safe_open(path, "pt") as file:  # its tensors are views of the mapped file
            return {key: file.get_tensor(key) for key in file.keys()}
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is neither a torch nor a safetensors file ({error})") from None


def _read_torch(path: Path, mmap: bool) -> dict:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} holds other objects than tensors, which could run code, or is damaged; it was "
                              f"not loaded ({reason})") from None
    except (RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} is damaged or cut short ({str(error).splitlines()[0]})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors")
    return content


def _choose(path: Path, content: dict, weights: str | None, within: str = "") -> tuple[str | None, dict]:
    models = {name: value for name, value in content.items()
              if isinstance(value, dict) and value and all(isinstance(k, str) for k in value)}
    tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
    if not models:
        if not tensors:
            raise CheckpointError(f"{path} holds no tensors{within}")
        if weights is not None:
            raise CheckpointError(f"{path} holds one model only, there is no {weights!r} to choose")
        return None, tensors
    known = [name for name in (*WEIGHT_NAMES, *LORA_NAMES) if name in models]
    name = weights if weights is not None else next(iter(known), None)
    if name not in models:
        asked = "none of the names known here" if name is None else f"no {name!r}"
        raise CheckpointError(f"{path} has {asked}{within}; choose one of {', '.join(map(str, models))} "
                              "with `weights`")
    if any(isinstance(value, dict) for value in models[name].values()):  # {"model": {"generator": ...}}
        inner, tensors = _choose(path, models[name], None, f" in {name!r}")
        return f"{name}.{inner}", tensors
    return name, {key: value for key, value in models[name].items() if isinstance(value, torch.Tensor)}


def _refuse_quantized(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.element_size() > 1 or key == "freqs" or tensor.ndim == 0:
            continue
        raise CheckpointError(f"{path}: {key} is {tensor.dtype}: quantized weights cannot be converted, take the "
                              "checkpoint in bfloat16 or float32 and quantize after loading")
