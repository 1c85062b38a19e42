"""What a backend refuses, and why: everything that can be said without a GPU."""

import sys
import types

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName

from bc_diffusers import BlockCausalKVCache, RolloutSpec, block_causal_attention
from bc_diffusers.attention import BACKENDS, CallShape, choose_backend, cudnn, explain_backends, fa4
from bc_diffusers.attention.backends import paged_backend


CPU = CallShape(torch.device("cpu"), torch.float32, 4, 2, 64, 128)
CUDA = CallShape(torch.device("cuda", 0), torch.bfloat16, 32, 8, 128, 128)


def changed(shape, **changes):
    return CallShape(**{**shape.__dict__, **changes})


@pytest.fixture
def hopper(monkeypatch):
    """As if an H200 were there and both libraries fit."""
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability[0])
    monkeypatch.setattr(cudnn, "_import_error", lambda: None)
    monkeypatch.setattr(fa4, "_load", lambda: (None, None))
    return capability


def test_on_a_cpu_auto_is_the_reference_and_the_others_say_why_not():
    assert choose_backend("auto", CPU).name == "reference"
    reasons = explain_backends(CPU)
    assert list(reasons) == list(BACKENDS) and list(reasons)[-1] == "reference" and reasons["reference"] is None
    for name in ("cudnn", "fa4"):
        assert reasons[name] == "it runs on CUDA devices, not on cpu"
        with pytest.raises(ValueError, match=f"attention backend '{name}' cannot serve this call: it runs on CUDA"):
            choose_backend(name, CPU)
    with pytest.raises(ValueError, match="unknown attention backend 'flash': choose auto or one of fa4, cudnn, ref"):
        choose_backend("flash", CPU)


@pytest.mark.parametrize("changes,best", [
    ({}, "fa4"), ({"page_size": 64}, "cudnn"), ({"head_dim": 96}, "cudnn"), ({"head_dim": 64}, "fa4"),
    ({"dtype": torch.float16}, "fa4"), ({"dtype": torch.float32}, "reference"), ({"page_size": 2}, "reference"),
    ({"head_dim": 20}, "reference"), ({"head_dim": 512}, "reference")])
def test_auto_takes_the_fastest_that_serves(hopper, changes, best):
    assert choose_backend("auto", changed(CUDA, **changes)).name == best


@pytest.mark.parametrize("name,changes,reason", [
    ("cudnn", {"dtype": torch.float8_e4m3fn}, "no kernel for torch.float8_e4m3fn: bfloat16 or float16"),
    ("cudnn", {"page_size": 2}, "page_size 2 must be at least 4"),
    ("cudnn", {"head_dim": 100}, "head_dim 100 must be a multiple of 8, at most 256"),
    ("fa4", {"dtype": torch.float32}, "no kernel for torch.float32"),
    ("fa4", {"page_size": 256}, "page_size 256 is not 128"),
    ("fa4", {"head_dim": 96}, "head_dim 96 is neither 64 nor 128")])
def test_a_named_backend_says_what_it_cannot_do(hopper, name, changes, reason):
    with pytest.raises(ValueError, match=f"{name}.*{reason}"):
        choose_backend(name, changed(CUDA, **changes))


def test_other_generations(hopper):
    hopper[0] = (8, 0)
    assert choose_backend("auto", CUDA).name == "cudnn"
    assert "compute capability 9.0" in fa4.refuses(CUDA)
    assert "at most 128" in cudnn.refuses(changed(CUDA, head_dim=256))
    hopper[0] = (7, 5)
    assert choose_backend("auto", CUDA).name == "reference"
    assert cudnn.refuses(CUDA) == "it needs compute capability 8.0 or later, this device has 7.5"


@pytest.mark.parametrize("version,reason", [
    (90100, "no usable paged attention: 9.5 or later"), (91001, "neither 9.10.0 nor 9.10.1"), (91900, None)])
def test_cudnn_versions(monkeypatch, version, reason):
    monkeypatch.setitem(sys.modules, "cudnn", types.SimpleNamespace(backend_version=lambda: version))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    error = cudnn._import_error.__wrapped__()
    assert error is None if reason is None else reason in error
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91300)
    assert f"loaded cuDNN {version}, torch has 91300" in cudnn._import_error.__wrapped__()


def test_missing_libraries_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    assert "pip install nvidia-cudnn-frontend" in cudnn._import_error.__wrapped__()
    assert "pip install 'bc-diffusers[fa4]'" in fa4._load.__wrapped__()[1]
    module = types.SimpleNamespace(_flash_attn_fwd=lambda q, k, v, page_table=None: None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    assert "takes no cu_seqlens_q" in fa4._load.__wrapped__()[1]


def test_set_attention_backend_decides_or_is_refused():
    name = AttentionBackendName
    assert paged_backend(None, "auto") == "auto" and paged_backend(name.NATIVE, "cudnn") == "cudnn"
    assert paged_backend(name._NATIVE_CUDNN, "auto") == "cudnn" and paged_backend("flash_4_hub", "fa4") == "fa4"
    with pytest.raises(ValueError, match="'sage'.* has no paged path .* 'native', '_native_cudnn', 'flash_4_hub'"):
        paged_backend(name.SAGE, "auto")
    with pytest.raises(ValueError, match="'_native_cudnn'.* and attention backend 'fa4' do not go together"):
        paged_backend(name._NATIVE_CUDNN, "fa4")


def test_a_call_is_refused_before_anything_is_staged():
    spec = RolloutSpec(window_tokens=8, max_staged_tokens=4, causal_blocks={4: 1})
    pool = BlockCausalKVCache.pool_tokens_for(spec, 4)
    cache = BlockCausalKVCache(num_layers=1, num_kv_heads=2, head_dim=8, page_size=4, pool_tokens=pool,
                               dtype=torch.float32, device="cpu").open(spec)
    q = torch.ones(1, 4, 2, 8)
    with pytest.raises(ValueError, match="'cudnn' cannot serve this call"):
        block_causal_attention(q, q, q, cache.plan(4, 4), 0, backend="cudnn")
    assert not cache._pool.any()
    two = torch.ones(2, 4, 2, 8)
    with pytest.raises(ValueError, match=r"q must be \[1, rows, heads, head_dim\] \(a cache is one video\)"):
        block_causal_attention(two, two, two, cache.plan(4, 4), 0)
