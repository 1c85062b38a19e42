"""Classifier-free guidance for models that need it: a second history, made under the negative prompt."""

import dataclasses

import torch

from .resources import RolloutGeometry, RolloutResources


class NegativeBranch:
    """The same rollout seen under the negative prompt: a cache of its own, which gets the same latents in every pass,
    the clean pass included. It doubles the passes and the cache's memory.

    Args:
        scale (`float`): velocity = negative + scale * (positive - negative).
    """

    def __init__(self, pipe, adapter, geometry: RolloutGeometry, conditions: dict, scale: float):
        self.scale, self._conditions, self._adapter = scale, conditions, adapter
        # A geometry of its own, so that the pipeline keeps this cache beside the positive one.
        self._geometry = dataclasses.replace(geometry, branch="negative")
        self.resources: RolloutResources = pipe._stock.acquire(self._geometry, adapter)
        try:
            self.resources.cache.open(geometry.spec, adapter.prompt_tokens(conditions) + geometry.sink_tokens)
        except BaseException:
            pipe._stock.release(self.resources)
            raise
        self._plan, self._begun = None, False

    def start_chunk(self, first_frame: int, cuda_graphs: bool) -> None:
        self.resources.rotary.set_start(first_frame)
        self.resources.start_chunk(self._adapter, cuda_graphs)
        if not self._begun:  # models that keep the prompt's K and V in the cache write them
            self._adapter.begin(self.resources.cache, self._conditions)
            self._begun = True

    def plan(self, tokens: int, causal_block_size: int) -> None:
        self._plan = self.resources.cache.plan(tokens, causal_block_size)

    def guide(self, positive: torch.Tensor, latents: torch.Tensor, timestep: torch.Tensor, how: dict) -> torch.Tensor:
        """The guided velocity, from the positive one of the same latents; stages the negative branch's K and V."""
        negative = self.resources.forward(self._adapter, latents, timestep, self._conditions, self._plan, how).float()
        return negative + self.scale * (positive.float() - negative)

    def commit(self) -> None:
        self.resources.cache.commit()

    def release(self, pipe) -> None:
        pipe._stock.release(self.resources)
