"""What all tests share: the ``device`` fixture, the ``gpu`` marker and the hypothesis profiles.

``HYPOTHESIS_PROFILE=thorough pytest`` searches longer and with a fresh seed; the default, ``ci``, is fast and always
runs the same examples.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings


settings.register_profile(
    "ci", max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "thorough",
    max_examples=600,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device and is skipped without one")


_cuda = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


# Session scope: hypothesis refuses fixtures that are set up once a test but not once an example.
@pytest.fixture(scope="session", params=["cpu", _cuda])
def device(request):
    """Every device that the library runs on here."""
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device(request.param)
