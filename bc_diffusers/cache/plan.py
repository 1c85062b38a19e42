"""ForwardPlan: how one forward cuts its tokens. LayerCache: one layer's view of the cache."""

import torch

from .. import ops


class ForwardPlan:
    """`num_tokens` real tokens in causal blocks of `causal_block_size` (the last may be short).

    A plan says nothing of positions: the same plan serves every chunk of its shape, and a captured graph too.
    `graph_key` = (cache, spec, num_tokens, causal_block_size), all counters.
    """

    def __init__(self, cache, state, num_tokens: int, causal_block_size: int):
        self.cache, self._state = cache, state
        self.num_tokens, self.causal_block_size = num_tokens, causal_block_size
        self.num_causal_blocks = -(-num_tokens // causal_block_size)
        self.graph_key = (cache.index, state.index, num_tokens, causal_block_size)
        self._views = state.views[causal_block_size]

    @property
    def pages(self) -> torch.Tensor:
        """int32 [causal blocks, list length]: page lists of this plan's causal blocks."""
        return self._views.pages[:self.num_causal_blocks]

    @property
    def totals(self) -> torch.Tensor:
        """int32 [causal blocks]: keys of each causal block, own tokens included, as the last scatter wrote them."""
        return self._views.totals[:self.num_causal_blocks]

    def check_open(self) -> None:
        """Raises a RuntimeError once the rollout that this plan was made for is over."""
        if self.cache._state is not self._state:
            raise RuntimeError("this plan belongs to a rollout that is no longer open: plan again after open(spec)")

    def __repr__(self) -> str:
        return f"ForwardPlan({self.num_tokens} tokens in causal blocks of {self.causal_block_size})"


class LayerCache:
    """One layer of a cache. Processors hold it: an object a layer, so that traced code reads no layer number."""

    def __init__(self, cache, index: int):
        self.cache, self.index, self.pool = cache, index, cache._pool[index]

    def write(self, k: torch.Tensor, v: torch.Tensor, plan: ForwardPlan) -> None:
        """Stages K and V, each [rows, kv_heads, head_dim], in one launch: table slots and private pages alike."""
        views = plan._views
        ops.scatter_kv_slots_(k, v, self.pool, views.dst, views.dst2, views.src, plan.num_tokens, views.lengths,
                              views.totals, plan.causal_block_size)
