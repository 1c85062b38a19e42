"""Adapters: one a diffusers transformer family. `docs/adding_a_model.md` tells how to add another."""

from .base import BlockCausalAdapter as BlockCausalAdapter
from .base import LayerGeometry as LayerGeometry
from .base import VideoFormat as VideoFormat
from .cosmos3_adapter import Cosmos3Adapter
from .ltx_adapter import LTXAdapter
from .skyreels_adapter import SkyReelsAdapter
from .wan_adapter import WanAdapter
from .wan_parity import WanParityAdapter


ADAPTERS: list[type[BlockCausalAdapter]] = [WanAdapter, SkyReelsAdapter, Cosmos3Adapter, LTXAdapter]


def register_adapter(adapter: type[BlockCausalAdapter]) -> type[BlockCausalAdapter]:
    """Makes a family known (usable as a class decorator). A later adapter takes precedence for its transformers."""
    if not adapter.transformer_classes:
        raise ValueError(f"{adapter.__name__} names no transformer_classes")
    ADAPTERS.insert(0, adapter)
    return adapter


def adapter_class_for(transformer_class: str) -> type[BlockCausalAdapter]:
    """The adapter of a transformer, by the name of its class.

    Raises:
        ValueError: if no family has it (the message lists those that exist).
    """
    for adapter in ADAPTERS:
        if transformer_class in adapter.transformer_classes:
            return adapter
    known = ", ".join(name for adapter in ADAPTERS for name in adapter.transformer_classes)
    raise ValueError(f"no block-causal adapter for {transformer_class}: supported transformers are {known}")


def parity_adapter(adapter: BlockCausalAdapter) -> BlockCausalAdapter:
    """The adapter that rounds as the original code of the same family does.

    Raises:
        ValueError: if that family has none.
    """
    name = type(adapter.transformer).__name__
    if not isinstance(adapter, WanAdapter) or name != "WanTransformer3DModel":
        raise ValueError(f"parity with the original code exists for WanTransformer3DModel, not for {name}")
    return WanParityAdapter(adapter.transformer)
