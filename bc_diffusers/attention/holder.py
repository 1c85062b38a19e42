"""How a forward's plan reaches the processors inside a stock transformer: one holder object a transformer."""

import contextlib
import threading
from dataclasses import dataclass

import torch

from ..cache import BlockCausalKVCache, ForwardPlan


@dataclass
class CachedForward:
    """What the processors of one forward need besides their own layer.

    `cos`, `sin` are float32 [rows, head_dim / 2] for the plan's tokens; `backend` as in `block_causal_attention`.
    """

    plan: ForwardPlan
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    backend: str = "auto"


class PlanHolder:
    """Shared by a transformer's self-attention processors. Without an active forward they are the stock ones."""

    def __init__(self):
        self.active: CachedForward | None = None  # or what else a family's processors understand
        self.processors: list = []
        self._turn = threading.RLock()  # streams in several threads take turns, forward by forward

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
