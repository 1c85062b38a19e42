"""Attention through the cache: the function, its backends, and the processors that put it into diffusers models."""

from .backends import BACKENDS as BACKENDS
from .backends import CallShape as CallShape
from .backends import choose_backend as choose_backend
from .backends import explain_backends as explain_backends
from .functional import block_causal_attention as block_causal_attention
from .holder import CachedForward as CachedForward
from .holder import PlanHolder as PlanHolder
from .processor import BlockCausalAttnProcessor as BlockCausalAttnProcessor
