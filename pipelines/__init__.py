"""The autoregressive video pipeline."""

from .block_causal_pipeline import BlockCausalVideoPipeline as BlockCausalVideoPipeline
from .chunk import VideoChunk as VideoChunk
from .rollout_config import PRESETS as PRESETS
from .rollout_config import RolloutConfig as RolloutConfig
from .stream import VideoStream as VideoStream
from .streaming_decoder import StreamingDecoder as StreamingDecoder
from .streaming_decoder import WanStreamingDecoder as WanStreamingDecoder
