"""The reference is held against itself: two ways to say the contract, and small masks written by hand."""

import pytest
import torch

from block_causal_reference import (
    ReferenceRollout,
    block_causal_mask,
    causal_block_spans,
    dense_attention,
    kept_positions,
    visible_positions,
)


def test_a_mask_written_by_hand():
    """Two chunks of 4, causal blocks of 2, one pinned token, window 3."""
    by_hand = """
        XX......
        XX......
        XXXX....
        XXXX....
        XXXXXX..
        XXXXXX..
        X..XXXXX
        X..XXXXX
    """.split()
    mask = block_causal_mask([4, 4], 2, pin_tokens=1, window_tokens=3)
    assert ["".join("X" if seen else "." for seen in row) for row in mask.tolist()] == by_hand


def test_spans_and_visible_positions_by_hand():
    assert causal_block_spans(10, 7, 3) == [(10, 13), (13, 16), (16, 17)]
    assert causal_block_spans(10, 2, 3) == [(10, 12)]
    assert visible_positions(10, 13, pin_tokens=2, window_tokens=4) == [0, 1, 6, 7, 8, 9, 10, 11, 12]
    assert visible_positions(3, 5, pin_tokens=9, window_tokens=0) == [0, 1, 2, 3, 4]
    assert visible_positions(6, 7, pin_tokens=4, window_tokens=3) == [0, 1, 2, 3, 4, 5, 6]
    assert kept_positions(10, pin_tokens=2, window_tokens=3) == [0, 1, 7, 8, 9]
    assert kept_positions(3, pin_tokens=5, window_tokens=0) == [0, 1, 2]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_chunk_by_chunk_is_one_masked_forward(device, size):
    chunks, pin, window = [7, 7, 3, 7, 5, 7], 4, 6
    generator = torch.Generator().manual_seed(3)
    total = sum(chunks)
    q, k, v = (torch.randn(total, heads, 8, generator=generator).to(device) for heads in (4, 2, 2))
    mask = block_causal_mask(chunks, size, pin, window, device=device)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 8**0.5
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
    whole = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1))

    rollout = ReferenceRollout(1, 2, 8, window_tokens=window, pin_tokens=pin, device=device)
    for chunk in chunks:
        now = slice(rollout.committed, rollout.committed + chunk)
        rollout.write(0, rollout.committed, k[now], v[now])
        out = rollout.attend(0, torch.cat([q[now], q[:2]])[None], chunk, size)
        torch.testing.assert_close(out[0, :chunk], whole[now], atol=1e-5, rtol=0)
        assert not out[0, chunk:].any()
        rollout.commit(chunk)
    assert rollout.window_start == total - window


def test_dense_attention_is_scaled_dot_product_attention(device):
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(n, heads, 16, generator=generator).to(device) for n, heads in ((5, 6), (9, 2), (9, 2)))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(dense_attention(q, k, v), expected, atol=1e-5, rtol=0)


def test_what_was_not_written_reads_as_nan_and_what_is_evicted_is_gone():
    rollout = ReferenceRollout(2, 1, 4, window_tokens=2, pin_tokens=1)
    rollout.write(0, 0, torch.ones(4, 1, 4), torch.ones(4, 1, 4))
    assert rollout.read(1, [3])[0].isnan().all()
    rollout.zero_values(3, 4)
    k, v = rollout.read(0, [2, 3])
    assert k.eq(1).all() and v[:, 0, 0].tolist() == [1, 0]
    rollout.commit(4)
    assert rollout.read(0, [0, 2, 3])[0].shape == (3, 1, 4)
    with pytest.raises(KeyError):
        rollout.read(0, [1])
