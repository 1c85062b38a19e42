"""Whether a module's weights may be read in its stead."""

import torch


def is_plain(module: torch.nn.Module, device: torch.device) -> bool:
    """Whether calling `module` does no more than its class says, with weights that are on `device` already: no hook
    runs (offloading brings weights in one), and no weight is quantized or stands for something else."""
    state = module.__dict__
    if module._forward_hooks or module._forward_pre_hooks or "forward" in state or "_hf_hook" in state:
        return False
    return all(weight is None or type(weight) in (torch.nn.Parameter, torch.Tensor) and weight.device == device
               for weight in module._parameters.values())
