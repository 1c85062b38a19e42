"""The scorer reads rendered clips without error and notices what is wrong; part of the score on the shipped model."""

import pytest
import torch
from captions import caption, held_out_prompts
from measure import CRITERIA, judge, measure
from score import NAMED, judge_all, pipeline_maker, score_switch, summary, switch_attributes, switch_row, together
from shape_world import STILL, first_frame_of_chunk, render_attributes
from tiny_nets import decode, encode, load

from bc_diffusers import BlockCausalVideoPipeline, embedded_model


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rendered(attributes, frames=81, switch_frame=None):
    video = render_attributes(attributes, frames, torch.Generator().manual_seed(5), switch_frame)
    return (video / 2 + 0.5).transpose(1, 2)


def test_rendered_clips_are_all_right():
    attributes = held_out_prompts(24)
    results = judge_all(rendered(attributes), attributes)
    assert together(results, CRITERIA).all() and results["object"].all(), summary(results)


@pytest.mark.parametrize("column, criterion", [(0, "color"), (1, "shape"), (2, "size"), (3, "speed"), (4, "direction"),
                                               (5, "background")])
def test_a_wrong_attribute_fails_its_criterion(column, criterion):
    attributes = held_out_prompts(40)
    attributes = attributes[attributes[:, 4] != STILL][:6]
    wrong = attributes.clone()
    choices = {0: 6, 1: 3, 2: 2, 3: 2, 4: 4, 5: 3}[column]
    wrong[:, column] = (wrong[:, column] + 1) % choices
    results = judge(measure(rendered(wrong)), attributes)
    assert not results[criterion].any()
    untouched = "shape" if criterion == "color" else "color"
    assert results[untouched].all()


def test_a_missing_object_and_a_jump_are_noticed():
    attributes = held_out_prompts(4)
    videos = rendered(attributes)
    gone = videos.clone()
    gone[:, 30:] = gone[:, 30:, :, :1, :1]
    assert not judge_all(gone, attributes)["persists"].any()
    assert not judge_all(videos[:, :1, :, :1, :1].expand_as(videos), attributes)["object"].any()
    torn = videos.clone()
    torn[:, 40:] = torn[:, 40:].roll((12, 12), (-2, -1))
    assert not judge_all(torn, attributes)["smooth"].any()


@pytest.mark.parametrize("attribute", NAMED)
def test_rendered_prompt_changes_are_read_right(attribute):
    before, after = switch_attributes(attribute, 12)
    videos = rendered(torch.stack([before, after], 1), switch_frame=first_frame_of_chunk(4))
    row = switch_row(videos, attribute, after)
    assert row["first_chunk"] == row["third_chunk"] == 1.0 and row["judged"] >= 8
    unchanged = switch_row(rendered(before), attribute, after)
    assert unchanged["third_chunk"] == 0.0 or attribute == "direction"  # where a bounce may look like obedience


@torch.no_grad()
def test_clips_through_the_vae_are_right():
    vae = load(embedded_model())[0]
    attributes = held_out_prompts(6)
    video = render_attributes(attributes, 45, torch.Generator().manual_seed(6))
    coded = decode(vae, encode(vae, video).chunk(2, 1)[0]).clamp(-1, 1)
    results = judge_all((coded / 2 + 0.5).transpose(1, 2), attributes)
    assert together(results, CRITERIA).all(), summary(results)


def test_the_shipped_model_scores_on_fixed_seeds():
    """The first prompts of the protocol, through the package's pipeline, and one prompt change of each kind."""
    pipe = BlockCausalVideoPipeline.from_pretrained(embedded_model(), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    make = pipeline_maker(pipe)
    attributes = held_out_prompts(5)
    videos = make({0: [caption(a) for a in attributes.tolist()]}, [1000 + i for i in range(5)], 7)
    results = judge_all(videos, attributes)
    assert results["object"].all()
    assert together(results, CRITERIA).sum() >= 4, summary(results)
    changes = score_switch(make, 1)
    assert sum(changes[attribute]["third_chunk"] for attribute in NAMED) >= 3, changes
