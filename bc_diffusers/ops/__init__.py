"""The operators under `torch.ops.bc_diffusers`: schemas, fakes and CPU implementations; CUDA ones when compiled."""

import torch

from . import checks
from . import cpu as cpu
from .schemas import SCHEMAS as SCHEMAS
from .schemas import library


def _fake(check):
    def run(*args, **kwargs):
        check(*args, **kwargs)

    return run


for _name in SCHEMAS:
    torch.library.register_fake(f"bc_diffusers::{_name}", _fake(getattr(checks, _name)), lib=library)

advance_state_ = torch.ops.bc_diffusers.advance_state_
block_causal_layout_ = torch.ops.bc_diffusers.block_causal_layout_
copy_kv_slots_ = torch.ops.bc_diffusers.copy_kv_slots_
merge_partials_ = torch.ops.bc_diffusers.merge_partials_
qk_norm_rope_ = torch.ops.bc_diffusers.qk_norm_rope_
rotate_rows_ = torch.ops.bc_diffusers.rotate_rows_
scatter_kv_slots_ = torch.ops.bc_diffusers.scatter_kv_slots_
