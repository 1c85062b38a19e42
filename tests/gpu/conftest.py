import pytest
import torch


def pytest_collection_modifyitems(items):
    """Everything in this folder needs a CUDA device and is skipped without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def launches():
    """`launches(call)`: what the profiler saw of one call: kernels, host-to-device bytes copied, synchronisations."""
    return profiled


class Profile:
    def __init__(self, events):
        on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        self.names = [e.name for e in events]
        self.kernels = [e.name for e in on_gpu if not e.name.startswith(("Memcpy", "Memset"))]
        self.host_to_device = [e.name for e in on_gpu if e.name.startswith("Memcpy") and "HtoD" in e.name]
        self.copies = [e.name for e in on_gpu if e.name.startswith(("Memcpy", "Memset"))]
        self.synchronisations = [name for name in self.names
                                 if "Synchronize" in name and not name.startswith("cudaDeviceSynchronize")]


def profiled(call):
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,
                                            torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()  # the one synchronisation that is not the call's own
    return Profile(profile.events())
