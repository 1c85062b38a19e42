"""LoRA: loading, scaling by attention_kwargs, fusing, unloading."""

import numpy as np
import pytest
import torch
from small_models import small_wan_pipeline

from bc_diffusers import BlockCausalVideoPipeline


peft = pytest.importorskip("peft")
GIVEN = {"prompt": "dance", "num_frames": 21, "seed": 0, "height": 32, "width": 48}


@pytest.fixture
def pipe():
    pipe = BlockCausalVideoPipeline.from_pipe(small_wan_pipeline(), preset="self-forcing", max_sequence_length=16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def lora_file(tmp_path_factory):
    pipe = small_wan_pipeline()
    pipe.transformer.add_adapter(peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v", "to_out.0"]))
    torch.manual_seed(1)
    for name, parameter in pipe.transformer.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    folder = tmp_path_factory.mktemp("lora")
    pipe.save_lora_weights(folder, transformer_lora_layers=peft.get_peft_model_state_dict(pipe.transformer))
    return folder


def test_load_scale_fuse_unload(pipe, lora_file):
    plain = pipe(**GIVEN).frames
    pipe.load_lora_weights(lora_file, adapter_name="style")
    assert pipe.get_active_adapters() == ["style"]
    full = pipe(**GIVEN).frames
    assert np.abs(full - plain).max() > 1e-3
    half = pipe(**GIVEN, attention_kwargs={"scale": 0.5}).frames
    assert np.abs(half - full).max() > 1e-4 and np.abs(half - plain).max() > 1e-4
    np.testing.assert_array_equal(pipe(**GIVEN).frames, full)  # the scale was for that call alone
    none = pipe(**GIVEN, attention_kwargs={"scale": 0.0}).frames
    np.testing.assert_allclose(none, plain, atol=1e-6)
    pipe.set_adapters("style", 0.5)
    np.testing.assert_allclose(pipe(**GIVEN).frames, half, atol=1e-6)
    pipe.set_adapters("style", 1.0)
    pipe.fuse_lora()
    np.testing.assert_allclose(pipe(**GIVEN).frames, full, atol=1e-4)
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    np.testing.assert_allclose(pipe(**GIVEN).frames, plain, atol=1e-5)


def test_a_lora_loaded_between_two_chunks_changes_the_chunks_to_come(pipe, lora_file):
    given = {"height": 32, "width": 48, "seed": 0, "output_type": "latent", "num_chunks": 3}
    plain = [chunk.latents for chunk in pipe.stream("dance", **given)]
    with pipe.stream("dance", **given) as stream:
        got = [next(stream).latents]
        pipe.load_lora_weights(lora_file)
        got += [chunk.latents for chunk in stream]
    assert torch.equal(got[0], plain[0]) and not torch.allclose(got[1], plain[1], atol=1e-3)
