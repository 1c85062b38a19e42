"""Cosmos3: another prompt, of another length, takes the old one's place in the fixed region."""

from unittest import mock

import pytest
import torch
from diffusers.models.transformers import transformer_cosmos3
from model_rollout import CHUNK_FRAMES, Rollout, assert_close
from tiny_models import Cosmos3, block_mask, cut


def two_prompt_reference(rollout, noisy, timestep, before, chunks_before):
    """The stock model over [old prompt | new prompt | video]: each prompt sees itself alone, history sees the prompt
    under which it was made, and the noisy chunk sees the new one, which ends where the old one did."""
    family, after = rollout.family, rollout.conditions["prompt_ids"]
    old, new = len(before), len(after)
    text = old + new
    per_frame, total = family.tokens_per_frame, rollout.frames + noisy.shape[2]
    positions = torch.arange(new).float()

    # Visibility as if there were one prompt of the old length, then each row's prompt columns are put in their place.
    start, blocks = old, [(0, old)]
    for frames in rollout.chunks:
        blocks += cut(start, start + frames * per_frame, rollout.block)
        start += frames * per_frame
    blocks.append((start, start + noisy.shape[2] * per_frame))
    one = block_mask(blocks, old + rollout.sink, rollout.window)[old:]
    gen = torch.cat((one[:, :old], torch.zeros(len(one), new, dtype=torch.bool), one[:, old:]), 1)
    changed = sum(rollout.chunks[:chunks_before]) * per_frame
    gen[changed:, :old], gen[changed:, old:text] = False, True
    own = torch.zeros(text, text, dtype=torch.bool)
    own[:old, :old], own[old:, old:] = True, True
    own &= torch.ones(text, text, dtype=torch.bool).tril()

    stock = transformer_cosmos3.dispatch_attention_fn
    rope = rollout.stock.rotary_emb

    def masked(query, key, value, is_causal=False, **kwargs):
        return stock(query, key, value, attn_mask=(own if is_causal else gen)[None, None], is_causal=False, **kwargs)

    def stock_call(latents):
        with mock.patch.object(transformer_cosmos3, "dispatch_attention_fn", masked), family.exact_rope(rollout.stock):
            exact = rope.forward

            def moved(position_ids, device, dtype):
                # Built for one prompt of `text` tokens: the old one at 0, the new one so that both end together.
                ids = position_ids.float().clone()
                ids[:, :, old:text] = positions
                ids[0, :, old:text] += old - new
                ids[0, :, text:] -= new
                return exact(ids, device, dtype)

            with mock.patch.object(rope, "forward", moved):
                return family.stock_call(rollout.stock, latents, rollout.frames, timestep,
                                         {"prompt_ids": torch.cat((before, after))})

    video = torch.cat((rollout.clean, noisy), 2)
    assert video.shape[2] == total
    with torch.no_grad():
        return stock_call(video)[:, :, rollout.frames:]


def change(rollout, tokens, seed=5):
    before, rollout.conditions = rollout.conditions, rollout.family.conditions(seed=seed, tokens=tokens)
    with torch.no_grad():
        rollout.adapter.change_prompt(rollout.cache, before, rollout.conditions)
    return before["prompt_ids"]


@pytest.mark.parametrize("sink_frames", [0, 1, 6])  # 6: the fixed region is not yet full when the prompt changes
@pytest.mark.parametrize("tokens", [3, 7, 16, 20])
def test_the_very_next_forward_sees_the_new_prompt_and_the_old_history(tokens, sink_frames):
    family = Cosmos3()
    rollout = Rollout(family, 1, window_frames=3, sink_frames=sink_frames)
    rollout.chunk()
    before = change(rollout, tokens)
    assert rollout.cache.committed == tokens + CHUNK_FRAMES * family.tokens_per_frame
    assert rollout.cache.pin_tokens == tokens + sink_frames * family.tokens_per_frame
    rollout.expected = lambda noisy, timestep: two_prompt_reference(rollout, noisy, timestep, before, 1)
    for frames in (CHUNK_FRAMES, 3, 2):
        assert_close(rollout.chunk(frames))


@pytest.mark.parametrize("tokens", [3, 20])
def test_without_history_it_is_a_video_of_the_new_prompt(tokens):
    """Window 0: all that a chunk sees is the prompt and itself, at the positions that the stock model gives them."""
    rollout = Rollout(Cosmos3(), CHUNK_FRAMES, window_frames=0)
    rollout.chunk()
    change(rollout, tokens)
    assert_close(rollout.chunk())


def test_a_prompt_may_change_before_every_chunk():
    rollout = Rollout(Cosmos3(), CHUNK_FRAMES, window_frames=0)
    for seed, tokens in enumerate((9, 2, 2, 20, 1, 14)):
        change(rollout, tokens, seed)
        assert_close(rollout.chunk())


def test_a_prompt_that_does_not_fit_is_refused_and_changes_nothing():
    rollout = Rollout(Cosmos3(), 1, window_frames=3, max_prompt=10)
    rollout.chunk()
    before = rollout.conditions
    with pytest.raises(ValueError, match="prefix of 11 tokens makes pin_tokens 11, .* max_pin_tokens is 10"):
        change(rollout, 11)
    rollout.conditions = before
    assert_close(rollout.chunk())
