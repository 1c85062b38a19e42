"""The paged block-causal K/V cache."""

from .geometry import Geometry as Geometry
from .kv_cache import BlockCausalKVCache as BlockCausalKVCache
from .plan import ForwardPlan as ForwardPlan
from .plan import LayerCache as LayerCache
from .spec import RolloutSpec as RolloutSpec
