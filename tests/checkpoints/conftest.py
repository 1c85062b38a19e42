import json
import shutil

import pytest
import torch
from diffusers.utils import logging
from self_forcing_oracle import Wan, WanSize

from bc_diffusers import embedded_model


SIZE = WanSize(dim=96, heads=4, ffn=160, layers=3, text_dim=64, freq_dim=64, channels=8)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quiet_loading():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="session")
def wan():
    """A small Wan under the original names, with random weights."""
    return Wan(SIZE).randomize(seed=0).eval()


@pytest.fixture(scope="session")
def other_wan():
    return Wan(SIZE).randomize(seed=1).eval()


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A stock Wan folder of that size: all but the transformer's weights."""
    folder = tmp_path_factory.mktemp("base") / "wan"
    shutil.copytree(embedded_model(), folder)
    shutil.rmtree(folder / "transformer")
    config = json.loads((embedded_model() / "transformer" / "config.json").read_text())
    config.update(attention_head_dim=SIZE.dim // SIZE.heads, num_attention_heads=SIZE.heads, ffn_dim=SIZE.ffn,
                  num_layers=SIZE.layers)
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    components = json.loads((folder / "model_index.json").read_text())
    index = {name: components[name] for name in ("tokenizer", "text_encoder", "vae", "transformer")}
    index.update(_class_name="WanPipeline", _diffusers_version="0.42.1",
                 scheduler=["diffusers", "UniPCMultistepScheduler"])
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="session")
def expected(wan, base):
    """The same weights under diffusers' names, by diffusers' own conversion."""
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    return convert_wan_transformer_to_diffusers(dict(wan.state_dict()))
