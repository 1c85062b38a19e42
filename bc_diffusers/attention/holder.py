"""How a forward's plan reaches the processors inside a stock transformer: one holder object a transformer."""

import contextlib
import threading
from dataclasses import dataclass

import torch

from ..cache import BlockCausalKVCache, ForwardPlan
from .ulysses import SequenceEnds, SequenceHooks, UlyssesGroup, ulysses_group_of


@dataclass
class CachedForward:
    """What the processors of one forward need besides their own layer.

    `cos`, `sin` are float32 [rows, head_dim / 2] for the plan's tokens; `backend` as in `block_causal_attention`;
    `ulysses` the ranks that share the sequence (set by `PlanHolder.use`), None if it is whole.
    """

    plan: ForwardPlan
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    backend: str = "auto"
    ulysses: UlyssesGroup | None = None


class PlanHolder:
    """Shared by a transformer's self-attention processors. Without an active forward they are the stock ones."""

    def __init__(self):
        self.active: CachedForward | None = None  # or what else a family's processors understand
        self.processors: list = []
        self._turn = threading.RLock()  # streams in several threads take turns, forward by forward
        self._group: UlyssesGroup | None = None
        self._hooks: SequenceHooks | None = None
        self._seen = None, None  # diffusers' config, the group made of it

    @property
    def ulysses(self) -> UlyssesGroup | None:
        """The ranks that share the sequence: ours (`share_sequence`), or those of diffusers' `enable_parallelism`."""
        config = getattr(self.processors[0], "_parallel_config", None) if self.processors else None
        if config is None:
            return self._group
        if self._group is not None:
            raise RuntimeError("both enable_context_parallel and diffusers' enable_parallelism split this "
                               "transformer's sequence: use one of them")
        if self._seen[0] is not config:
            self._seen = config, ulysses_group_of(config)
        return self._seen[1]

    def share_sequence(self, group: UlyssesGroup | None) -> None:
        """Shares the sequence of every cached forward among `group`, with our own hooks; None ends it."""
        self._group = group
        if group is None and self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def place_hooks(self, transformer: torch.nn.Module, ends: SequenceEnds) -> None:
        """Sees that the hooks of `share_sequence` are in place: a LoRA may have taken that of a module."""
        if self._hooks is not None and self._hooks.ends != ends:
            self._hooks.remove()
            self._hooks = None
        if self._hooks is None:
            self._hooks = SequenceHooks(self, transformer, ends)

    @contextlib.contextmanager
    def use(self, forward: CachedForward, cache: BlockCausalKVCache):
        """Makes `forward` active for the transformer call inside the `with`, and only for it: between two chunks the
        same transformer may serve a stock pipeline or another stream."""
        if cache.num_layers != len(self.processors):
            raise ValueError(f"the cache has {cache.num_layers} layers, the transformer {len(self.processors)}")
        with self._turn:
            if self.active is not None:
                raise RuntimeError("this transformer is already inside a cached forward")
            for index, processor in enumerate(self.processors):
                processor.layer = cache.layer(index)
            forward.ulysses = self.ulysses
            self.active = forward
            try:
                yield
            finally:
                self.active = None
                for processor in self.processors:
                    processor.layer = None

    @property
    def lock(self) -> threading.RLock:
        """Held during every cached forward: whoever has it knows that the transformer is idle."""
        return self._turn
