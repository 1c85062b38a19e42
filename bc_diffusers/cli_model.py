"""The options of the command line that say which model runs and where."""

import enum

from . import embedded_model


class Dtype(enum.StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def load_pipeline(model: str, preset: str | None, device: str | None, dtype: Dtype | None, quiet: bool = False):
    import torch
    from diffusers.utils import logging
    from transformers.utils import logging as transformers_logging

    from .pipelines import BlockCausalVideoPipeline

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (Dtype.bfloat16 if torch.device(device).type == "cuda" else Dtype.float32)
    logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    pipe = BlockCausalVideoPipeline.from_pretrained(model or embedded_model(), preset=preset,
                                                    dtype=getattr(torch, dtype.value))
    if quiet:
        pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)
