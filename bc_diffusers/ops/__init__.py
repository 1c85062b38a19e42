"""The operators under `torch.ops.bc_diffusers`: schemas, fakes and CPU implementations; CUDA ones when compiled."""

import torch

from . import checks, schemas
from . import cpu as cpu
from .library import load as load_cuda
from .schemas import SCHEMAS as SCHEMAS


def _fake(check):
    def run(*args, **kwargs):
        check(*args, **kwargs)

    return run


def _find_kernel(op):
    """What runs on a device without a kernel of its own: on CUDA that is the first call, which loads the library."""

    def run(*args, **kwargs):
        devices = {t.device.type for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)}
        loaded = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CUDA")
        if "cuda" not in devices or loaded:
            raise NotImplementedError(f"{op.name()} has no kernel for tensors on {', '.join(sorted(devices))}")
        load_cuda()
        return op(*args, **kwargs)

    return run


for _name in SCHEMAS:
    _op = getattr(torch.ops.bc_diffusers, _name).default
    torch.library.register_fake(_op.name(), _fake(getattr(checks, _name)), lib=schemas.library)
    schemas.library.impl(_name, _find_kernel(_op), "CompositeExplicitAutograd")

# The overloads themselves: a call through the packet looks the overload up each time.
advance_state_ = torch.ops.bc_diffusers.advance_state_.default
block_causal_layout_ = torch.ops.bc_diffusers.block_causal_layout_.default
commit_ = torch.ops.bc_diffusers.commit_.default
copy_kv_slots_ = torch.ops.bc_diffusers.copy_kv_slots_.default
merge_partials_ = torch.ops.bc_diffusers.merge_partials_.default
qk_norm_rope_ = torch.ops.bc_diffusers.qk_norm_rope_.default
residual_norm_ = torch.ops.bc_diffusers.residual_norm_.default
rotate_rows_ = torch.ops.bc_diffusers.rotate_rows_.default
scatter_kv_slots_ = torch.ops.bc_diffusers.scatter_kv_slots_.default
split_page_lists_ = torch.ops.bc_diffusers.split_page_lists_.default
