"""What a model needs and what it can do here, from its configs alone: no weight is read or downloaded.

    report = inspect_model("org/model", preset="self-forcing")
    report["tokens_per_frame"], report["memory"]["pool_bytes"], ...
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch


GIB = 2**30
CARDS = {f"{gib} GB": gib for gib in (12, 16, 24, 48, 80)}  # common cards, in GiB
CONTEXT_BYTES = GIB  # CUDA's context, the libraries' workspaces and the allocator's fragments
HUB_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "token")


def inspect_model(model: str | os.PathLike, *, preset: str | None = None, height: int | None = None,
                  width: int | None = None, dtype: torch.dtype | None = None, device: str | None = None,
                  attention_backend: str = "auto", **hub) -> dict:
    """A JSON-ready report on a pipeline folder or repository.

    Args:
        model (`str` or `Path`): as `BlockCausalVideoPipeline.from_pretrained` takes it. Of a repository only the
            configs are fetched, a few kilobytes.
        preset (`str`, *optional*): for models that do not say how they roll out.
        height, width (`int`, *optional*): pixels; default: the rollout's.
        dtype (`torch.dtype`, *optional*): default: bfloat16, on a CPU float32.
        device (`str`, *optional*): default: CUDA where there is one.
        attention_backend (`str`, *optional*, defaults to `"auto"`).
        hub: `cache_dir`, `local_files_only`, `revision`, `token`.

    Returns:
        `dict`: `family`, `transformer` (layers, heads, ...), `components` with the bytes of their weights,
        `autoregressive`, and where the rollout is known `rollout`, `window`, `memory`, `attention`. Bytes are exact
        for weights and pool; `working_bytes` is an estimate.

    Raises:
        ValueError, OSError: as `from_pretrained`, for a folder that is none, or a transformer without an adapter.
    """
    from .pipelines.block_causal_pipeline import BlockCausalVideoPipeline
    from .pipelines.rollout_config import FIELDS, PRESETS, resolve_rollout_config

    unknown = set(hub) - set(HUB_ARGUMENTS)
    if unknown:
        raise TypeError(f"unknown arguments {sorted(unknown)}: the hub's are {', '.join(HUB_ARGUMENTS)}")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    card_dtype = dtype or torch.bfloat16
    dtype = dtype or (torch.float32 if place.type == "cpu" else torch.bfloat16)
    source = ModelSource(model, hub)
    index = BlockCausalVideoPipeline.load_config(model, **hub)
    adapter = BlockCausalVideoPipeline.check_model_index(model, index)
    transformer, vae = source.skeleton("transformer", index), source.skeleton("vae", index)
    text_encoder = source.skeleton("text_encoder", index)
    parts = {"transformer": transformer, "text_encoder": text_encoder, "vae": vae}

    config, layers = transformer.config, adapter.layer_geometry(transformer.config)
    marked = resolve_rollout_config(index.get("preset"), {name: index.get(name) for name in FIELDS}) is not None
    given = {} if preset is not None else {name: index.get(name) for name in FIELDS}
    rollout = resolve_rollout_config(preset or index.get("preset"), given)
    report = {
        "model": str(model),
        "family": adapter.family,
        "pipeline": index.get("_class_name"),
        "transformer": {"class": type(transformer).__name__, "layers": layers.num_layers, "heads": layers.num_heads,
                        "kv_heads": layers.num_kv_heads, "head_dim": layers.head_dim,
                        "patch": list(adapter.patch_size(config))},
        "components": {name: {"class": type(part).__name__, "parameters": _count(part),
                              "bytes": _count(part) * dtype.itemsize}
                       for name, part in parts.items() if part is not None},
        "dtype": str(dtype).removeprefix("torch."),
        "device": _device_report(place),
        "autoregressive": marked,
        "preset": preset or index.get("preset"),
        "presets": list(PRESETS),
        "rollout": None if rollout is None else rollout.to_dict(),
    }
    if rollout is not None:
        report |= _rollout_report(rollout, adapter, parts, height, width, dtype, place, attention_backend)
        memory = report["memory"]
        memory["cards_dtype"] = str(card_dtype).removeprefix("torch.")
        memory["fits_cards"] = _fits_cards(report, card_dtype.itemsize / dtype.itemsize)
    return report


@dataclass
class ModelSource:
    """Configs of a folder or repository, and the models they describe without their weights."""

    model: str | os.PathLike
    hub: dict

    def skeleton(self, component: str, index: dict) -> torch.nn.Module | None:
        """The component on the meta device; `None` where the model has none."""
        library, name = index.get(component) or (None, None)
        if name is None:
            return None
        with torch.device("meta"):
            if library == "transformers":
                return self._transformers_model(component, name)
            return self._diffusers_model(component, name)

    def _diffusers_model(self, component: str, name: str) -> torch.nn.Module:
        import diffusers

        kind = getattr(diffusers, name, None)
        if kind is None:
            raise ValueError(f"{self.model}: diffusers {diffusers.__version__} has no {name}, its {component}")
        return kind.from_config(kind.load_config(self.model, subfolder=component, **self.hub))

    def _transformers_model(self, component: str, name: str) -> torch.nn.Module:
        import transformers

        kind = getattr(transformers, name, None)
        if kind is None:
            raise ValueError(f"{self.model}: transformers {transformers.__version__} has no {name}, its {component}")
        place, where = self.model, {"subfolder": component}
        if Path(self.model).is_dir():  # a local folder's subfolder is a folder
            place, where = Path(self.model) / component, {}
        return kind(transformers.AutoConfig.from_pretrained(place, **where, **self.hub))


def _count(part: torch.nn.Module) -> int:
    return sum(p.numel() for p in part.parameters())


def _device_report(device: torch.device) -> dict:
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("there is no CUDA device here: take --device cpu")
        free, total = torch.cuda.mem_get_info(device)
        return {"type": "cuda", "name": torch.cuda.get_device_name(device), "total_bytes": total, "free_bytes": free}
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    total = pages * os.sysconf("SC_PAGE_SIZE") if pages else None
    return {"type": device.type, "name": "CPU", "total_bytes": total, "free_bytes": None}


def _rollout_report(rollout, adapter, parts: dict, height, width, dtype, device, backend: str) -> dict:
    from .pipelines.resources import RolloutGeometry, check_size, pool_bytes
    from .pipelines.vae_support import scale_factors

    config = parts["transformer"].config
    temporal, spatial = scale_factors(parts["vae"])
    height = rollout.default_height if height is None else height
    width = rollout.default_width if width is None else width
    _, patch_height, patch_width = adapter.patch_size(config)
    check_size("height", height, spatial * patch_height)
    check_size("width", width, spatial * patch_width)
    frame = adapter.tokens_per_frame(config, height // spatial, width // spatial)
    geometry = RolloutGeometry(rollout, height // spatial, width // spatial, frame, dtype, device,
                               max_prompt_tokens=adapter.max_prompt_tokens(config, rollout.max_sequence_length))
    pool = pool_bytes(geometry, adapter, config)
    weights = {name: _count(part) * dtype.itemsize for name, part in parts.items() if part is not None}
    working = _working_bytes(adapter, config, parts["vae"], geometry, height, width, dtype)
    peaks = _peaks(weights, pool, working)
    return {
        "height": height, "width": width, "tokens_per_frame": frame, "tokens_per_chunk": frame * rollout.chunk_frames,
        "passes_per_chunk": len(rollout.denoising_sigmas) + 1,
        "window": _window_report(rollout, frame, temporal),
        "memory": {"weights_bytes": sum(weights.values()), "pool_bytes": pool, "working_bytes": working,
                   "peak_bytes": peaks[0], "peak_bytes_offloaded": peaks[1],
                   "fits": _verdict(peaks, _device_report(device)["total_bytes"])},
        "attention": _attention_report(adapter.layer_geometry(config), dtype, device, backend),
    }


def _window_report(rollout, tokens_per_frame: int, temporal: int) -> dict:
    """What a chunk sees, in latent frames (how it is trained), pixel frames and seconds (how it is watched)."""
    def words(frames: int) -> dict:
        pixels = frames * temporal
        return {"latent_frames": frames, "pixel_frames": pixels, "seconds": round(pixels / rollout.default_fps, 3),
                "tokens": frames * tokens_per_frame}

    visible = rollout.sink_frames + rollout.window_frames + rollout.chunk_frames
    return {"chunk": words(rollout.chunk_frames), "window": words(rollout.window_frames),
            "sink": words(rollout.sink_frames), "visible": words(visible)}


def _working_bytes(adapter, config, vae, geometry, height: int, width: int, dtype: torch.dtype) -> int:
    """An estimate of what a pass or a decode takes besides weights and pool; the larger of the two counts.

    Transformer: about a dozen activations of the model's width a token, two of its feed-forward. Decoder: frames of
    one latent frame at full size, about six times on the way, and as much again kept by the causal convolutions.
    """
    layers = adapter.layer_geometry(config)
    wide = layers.num_heads * layers.head_dim
    feed_forward = config.get("ffn_dim") or 4 * wide
    tokens = geometry.tokens_per_frame * geometry.config.chunk_frames
    forward = tokens * (12 * wide + 2 * feed_forward) * dtype.itemsize
    get = getattr(vae, "config", {}).get
    patch = get("patch_size") or 1
    channels = get("decoder_base_dim") or get("base_dim") or 128
    frames = get("scale_factor_temporal") or 4
    decode = 12 * frames * channels * (height // patch) * (width // patch) * dtype.itemsize
    return max(forward, decode)


def _peaks(weights: dict, pool: float, working: float) -> tuple[float, float]:
    """Peak bytes with everything on the device, and with `enable_model_cpu_offload`, where the text encoder and the
    transformer take turns while the cache and the VAE stay."""
    text, transformer = weights.get("text_encoder", 0), weights["transformer"]
    stays = weights.get("vae", 0) + pool + CONTEXT_BYTES
    return text + transformer + working + stays, max(text, transformer + working) + stays


def _verdict(peaks: tuple[float, float], room: float | None) -> str:
    if room is None:
        return "unknown"
    return "all of it" if peaks[0] <= room else "text encoder offloaded" if peaks[1] <= room else "no"


def _fits_cards(report: dict, scale: float) -> dict:
    """On which cards it fits; `scale`: bytes of a number there by bytes of a number in the report."""
    weights = {name: part["bytes"] * scale for name, part in report["components"].items()}
    peaks = _peaks(weights, report["memory"]["pool_bytes"] * scale, report["memory"]["working_bytes"] * scale)
    return {name: _verdict(peaks, room * GIB) for name, room in CARDS.items()}


def _attention_report(layers, dtype, device, backend: str) -> dict:
    from .attention.backends import BACKENDS, CallShape, choose_backend
    from .pipelines.resources import PAGE_SIZE, on_device

    shape = CallShape(on_device(device), dtype, layers.num_heads, layers.num_kv_heads, layers.head_dim, PAGE_SIZE)
    refusals = {name: candidate.refuses(shape) for name, candidate in BACKENDS.items()}
    chosen = choose_backend(backend, shape).name
    return {"backend": chosen, "requested": backend, "page_size": PAGE_SIZE,
            "refused": {name: reason for name, reason in refusals.items() if reason is not None},
            "also_possible": [name for name, reason in refusals.items() if reason is None and name != chosen]}
