"""Attention through the cache: the function, its backends, and the processors that put it into diffusers models."""

from .functional import block_causal_attention as block_causal_attention
