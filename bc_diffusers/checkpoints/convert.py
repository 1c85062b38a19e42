"""An original checkpoint and a stock Wan folder become a folder that `BlockCausalVideoPipeline` loads."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import diffusers
import torch
from diffusers import FlowMatchLCMScheduler
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors.torch import save_file

from ..pipelines.rollout_config import FIELDS, PRESETS, RolloutConfig, resolve_rollout_config
from .files import CheckpointError, open_checkpoint
from .lora import LoraFactors, adapter_state, read_lora
from .transformer import TransformerWeights, check_keys, empty_transformer, open_weights


BASE_COMPONENTS = ("tokenizer", "text_encoder", "vae")
ADAPTER_FILE = "pytorch_lora_weights.safetensors"
_LINKED = {".safetensors", ".bin", ".pt", ".pth"}  # large and never edited in place


def convert_checkpoint(
    checkpoint: str | Path,
    base: str | Path,
    output: str | Path,
    *,
    preset: str | None = None,
    weights: str | None = None,
    lora: str | Path | None = None,
    lora_alpha: float | None = None,
    keep_lora: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Writes a pipeline folder: the checkpoint's transformer, the base's tokenizer, text encoder and VAE, and how the
    model rolls out.

    Everything is checked before anything is written, and the folder gets its name only when it is complete. Memory
    stays near one shard: tensors are read from the mapped file when they are written.

    Args:
        checkpoint: `.pt`, `.safetensors` or a diffusers folder; the kind is told by its content.
        base: a stock Wan folder in diffusers' format, or the name of such a repository.
        output: the folder to write; must not exist, or be empty.
        preset (`str`, *optional*): how the checkpoint rolls out; optional only if `base` says it itself.
        weights (`str`, *optional*): which model of a file of several; default: `generator_ema` before `generator`.
        lora, lora_alpha (*optional*): a LoRA file, and its alpha if it is not the rank.
        keep_lora (`bool`): write the LoRA beside the model (`pipe.load_lora_weights(output)`) instead of merging it.
        dtype (`torch.dtype`, *optional*): cast the weights; default: as stored. What diffusers keeps in float32
            becomes float32.
        max_shard_size: as in `save_pretrained`.

    Returns:
        `Path`: the folder.

    Raises:
        CheckpointError, KeyMismatch: if the checkpoint is not one, or does not fit the base; nothing is written.
        FileExistsError: if `output` is there already.
    """
    output = Path(output).absolute()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists already: choose another output folder")
    if keep_lora and lora is None:
        raise ValueError("`keep_lora` needs `lora`, the file to keep")
    base = base_folder(base)
    index = _read_index(base)
    rollout = _rollout(base, index, preset)
    source = open_weights(checkpoint, weights, None if keep_lora else lora, lora_alpha, dtype)
    adapter = read_lora(open_checkpoint(lora), lora_alpha) if keep_lora else {}
    model = empty_transformer(transformer_config(base) or source.config())
    check_keys(source, model)
    source.check_lora(adapter)

    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}.partial-"))
    try:
        partial.chmod(0o777 & ~_umask())
        model.save_config(partial / "transformer")
        _write_shards(source, partial / "transformer", max_shard_size)
        if adapter:
            _write_adapter(adapter, partial)
        for name in BASE_COMPONENTS:
            shutil.copytree(base / name, partial / name, copy_function=_copy)
        FlowMatchLCMScheduler(shift=rollout.shift).save_pretrained(partial / "scheduler")
        _write_index(partial, index, preset, rollout)
        if output.exists():
            output.rmdir()
        os.rename(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return output


def base_folder(base: str | Path) -> Path:
    """The base as a local folder; a repository is fetched, its transformer's weights left out."""
    path = Path(base)
    if path.is_dir():
        return path
    if path.is_absolute() or str(base).count("/") != 1 or str(base).startswith("."):
        raise FileNotFoundError(f"there is no base folder {base}")
    return Path(snapshot_download(str(base), allow_patterns=["model_index.json", "transformer/config.json",
                                                             *(f"{name}/*" for name in BASE_COMPONENTS)]))


def transformer_config(base: Path) -> dict | None:
    """What the base says about its transformer, `None` if it has none."""
    file = base / "transformer" / "config.json"
    return json.loads(file.read_text()) if file.exists() else None


def _read_index(base: Path) -> dict:
    file = base / "model_index.json"
    if not file.exists():
        raise CheckpointError(f"{base} is no diffusers pipeline folder: it has no model_index.json")
    index = json.loads(file.read_text())
    lost = [name for name in BASE_COMPONENTS if not (base / name).is_dir() or not isinstance(index.get(name), list)]
    if lost:
        raise CheckpointError(f"the base folder {base} lacks {', '.join(lost)}")
    return index


def _rollout(base: Path, index: dict, preset: str | None) -> RolloutConfig:
    said = {} if preset is not None else {name: index.get(name) for name in FIELDS}
    rollout = resolve_rollout_config(preset or index.get("preset"), said)
    if rollout is None:
        raise ValueError(f"{base} does not say how its model rolls out: give a preset, one of {', '.join(PRESETS)}")
    return rollout


def _write_shards(source: TransformerWeights, folder: Path, max_shard_size: int | str) -> None:
    with torch.device("meta"):
        outline = {name: torch.empty(source.shape(name), dtype=source.target_dtype(name)) for name in source}
    split = split_torch_state_dict_into_shards(
        outline, filename_pattern="diffusion_pytorch_model{suffix}.safetensors", max_shard_size=max_shard_size)
    with source.progress_bar() as bar:
        for file, names in split.filename_to_tensors.items():
            shard = {}
            for name in names:
                shard[name] = source.load(name)
                bar.update(source.nbytes(name))
            save_file(shard, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(
            {"metadata": split.metadata, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True) + "\n")


def _write_adapter(adapter: dict[str, LoraFactors], folder: Path) -> None:
    save_file(adapter_state(adapter), folder / ADAPTER_FILE, metadata={"format": "pt"})


def _write_index(folder: Path, base_index: dict, preset: str | None, rollout: RolloutConfig) -> None:
    index = {
        "_class_name": "BlockCausalVideoPipeline", "_diffusers_version": diffusers.__version__,
        **{name: base_index[name] for name in BASE_COMPONENTS},
        "scheduler": ["diffusers", "FlowMatchLCMScheduler"], "transformer": ["diffusers", "WanTransformer3DModel"],
        "preset": preset or base_index.get("preset"), **rollout.to_dict(),
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _copy(source: str, target: str) -> None:
    """Weights of the base are linked where the file system can, small files (which people edit) copied."""
    real = os.path.realpath(source)
    if Path(source).suffix in _LINKED:
        try:
            os.link(real, target)
            return
        except OSError:
            pass
    shutil.copy2(real, target)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
