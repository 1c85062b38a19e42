"""What a rollout of one geometry needs on the device, and the pipeline's stock of it."""

import threading
import weakref
from dataclasses import dataclass

import torch

from ..cache import BlockCausalKVCache, ForwardPlan, RolloutSpec
from ..graphs import GraphRunner, why_not
from ..models import BlockCausalAdapter
from .rollout_config import RolloutConfig


PAGE_SIZE = 128


def on_device(device: torch.device | str) -> torch.device:
    """The device as its tensors say it: "cuda" is one of them, "cpu:0" is the CPU."""
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_size(name: str, value: int, unit: int) -> None:
    """Raises a ValueError, which names the nearest that works, unless `value` is a positive multiple of `unit`."""
    if not isinstance(value, int) or value < unit or value % unit:
        near = max(unit, round(value / unit) * unit)
        raise ValueError(f"`{name}` must be a multiple of {unit}, got {value}: the nearest is {near}")


@dataclass(frozen=True)
class RolloutGeometry:
    """Everything that decides the shapes of a rollout: streams of equal geometry can use one another's cache."""

    config: RolloutConfig
    height: int  # of a latent frame
    width: int
    tokens_per_frame: int
    dtype: torch.dtype
    device: torch.device
    max_prompt_tokens: int = 0  # of the prompt's K and V, for models that keep them in the cache
    branch: str = "positive"  # "negative": the second history of guidance
    parity: bool = False  # the roundings of the original code
    head_shards: int = 1  # ranks that share the heads of each layer

    def __post_init__(self):
        object.__setattr__(self, "device", on_device(self.device))

    @property
    def spec(self) -> RolloutSpec:
        return rollout_spec(self.config, self.tokens_per_frame, self.max_prompt_tokens)

    @property
    def clean_block_tokens(self) -> int:
        return (self.config.clean_block_frames or self.config.chunk_frames) * self.tokens_per_frame

    @property
    def sink_tokens(self) -> int:
        return self.config.sink_frames * self.tokens_per_frame


def rollout_spec(config: RolloutConfig, tokens_per_frame: int, max_prompt_tokens: int = 0) -> RolloutSpec:
    """The cache's spec of a rollout: a chunk is one causal block in the denoising passes, and `clean_block_frames` say
    how the clean pass cuts it. The fixed region holds the prompt (where the model keeps it in the cache), then the
    sink frames."""
    frames = config.chunk_frames
    chunk, block = frames * tokens_per_frame, config.clean_block_frames or frames
    blocks = {chunk: 1, block * tokens_per_frame: -(-frames // block)}
    return RolloutSpec(window_tokens=config.window_frames * tokens_per_frame, max_staged_tokens=chunk,
                       causal_blocks=blocks,
                       max_pin_tokens=max_prompt_tokens + config.sink_frames * tokens_per_frame)


def pool_bytes(geometry: RolloutGeometry, adapter: type[BlockCausalAdapter] | BlockCausalAdapter, config=None) -> int:
    """Bytes of the pool that a rollout of this geometry takes; known from the transformer's config alone."""
    layers = adapter.layer_geometry(adapter.transformer.config if config is None else config)
    return BlockCausalKVCache.pool_bytes_for(
        geometry.spec, page_size=PAGE_SIZE, num_layers=layers.num_layers, dtype=geometry.dtype,
        num_kv_heads=layers.num_kv_heads // geometry.head_shards, head_dim=layers.head_dim)


class RolloutResources:
    """A cache, the rotary tables and the CUDA graphs of one geometry; lent to one stream at a time."""

    def __init__(self, geometry: RolloutGeometry, adapter: BlockCausalAdapter):
        self.geometry = geometry
        layers, spec = adapter.layer_geometry(adapter.transformer.config), geometry.spec
        self.cache = BlockCausalKVCache(
            num_layers=layers.num_layers, num_kv_heads=layers.num_kv_heads // geometry.head_shards,
            head_dim=layers.head_dim, pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, PAGE_SIZE),
            page_size=PAGE_SIZE, dtype=geometry.dtype, device=geometry.device)
        self.rotary = adapter.make_rotary(geometry.config.chunk_frames, geometry.height, geometry.width,
                                          geometry.device)
        self.graphs, self._captures = GraphRunner(), False

    def start_chunk(self, adapter: BlockCausalAdapter, cuda_graphs: bool) -> None:
        """Says whether this chunk's forwards are captured and replayed, and drops the graphs of a changed model."""
        adapter.place_hooks()  # before the model is looked at: they are a part of it
        group = adapter.holder.ulysses
        self._captures = (cuda_graphs and self.geometry.device.type == "cuda"
                          and (group is None or group.can_be_captured) and why_not(adapter.transformer) is None)
        if self._captures:
            self.graphs.refresh(adapter.transformer, group)
        else:
            self.graphs.clear()

    def forward(self, adapter: BlockCausalAdapter, latents: torch.Tensor, timestep: torch.Tensor, conditions: dict,
                plan: ForwardPlan, how: dict) -> torch.Tensor:
        """`adapter.forward` in this cache. The velocity is valid until the next one: a graph writes it in place.

        Args:
            how: `backend`, `clean_frames` and `attention_kwargs` of the forward.
        """
        def call(latents, timestep, **conditions):
            return adapter.forward(latents, timestep, conditions, plan=plan, rotary=self.rotary, **how)

        conditions = {name: conditions[name] for name in adapter.forward_conditions}
        # A short last chunk comes once.
        if not self._captures or plan.num_tokens < self.geometry.spec.max_staged_tokens:
            return call(latents, timestep, **conditions)
        key = (plan.graph_key, repr(sorted(how.items(), key=lambda item: item[0])))
        return self.graphs(key, call, {"latents": latents, "timestep": timestep, **conditions})

    def free(self) -> None:
        self.graphs.clear()
        self.cache.shutdown()
        self.rotary = None


class ResourceStock:
    """Idle resources by geometry: a second stream of the same shape allocates nothing. Streams that are alive at once
    each have their own."""

    def __init__(self):
        self._idle: dict[RolloutGeometry, RolloutResources] = {}
        self.lent: weakref.WeakSet[RolloutResources] = weakref.WeakSet()  # to streams that are alive
        self._lock = threading.RLock()

    def acquire(self, geometry: RolloutGeometry, adapter: BlockCausalAdapter) -> RolloutResources:
        with self._lock:
            resources = self._idle.pop(geometry, None)
            if resources is None:
                try:
                    resources = RolloutResources(geometry, adapter)
                except torch.OutOfMemoryError:
                    if not self._idle:
                        raise
            if resources is None:  # outside of the handler, whose traceback would hold on to what did fit
                self.free()
                resources = RolloutResources(geometry, adapter)
            self.lent.add(resources)
            return resources

    def release(self, resources: RolloutResources) -> None:
        resources.cache.close()
        with self._lock:
            self.lent.discard(resources)
            previous = self._idle.pop(resources.geometry, None)
            self._idle[resources.geometry] = resources
        if previous is not None:
            previous.free()

    def free(self, keep: torch.device | None = None) -> None:
        """Frees the idle resources (those on `keep` excepted)."""
        with self._lock:
            strays = [self._idle.pop(geometry) for geometry in list(self._idle) if geometry.device != keep]
        for resources in strays:
            resources.free()
        if strays and torch.cuda.is_available():
            torch.cuda.empty_cache()
