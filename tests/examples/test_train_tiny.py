"""The training code of the embedded model: what it trains on is what a cached rollout does, and the whole recipe
runs."""

import json
from contextlib import nullcontext

import torch
from attention import dense, visibility
from captions import build_tokenizer, caption, token_ids
from pools import CHANNELS, LATENT
from rollout import Roller, text_inputs
from shape_world import CHUNK, first_frame_of_chunk, make_clips, random_attributes
from stages import Schedule, object_weight, per_frame
from tiny_nets import SIGMAS, build, decode, encode, shifted
from train_step import Layout, TrainStep


def small_nets(layers=2):
    torch.manual_seed(0)
    vae, transformer, text = build(transformer={"num_layers": layers, "ffn_dim": 64})
    with torch.no_grad():
        for parameter in transformer.parameters():  # fresh weights hardly attend to anything
            parameter.add_(0.03 * torch.randn_like(parameter))
    return vae.eval(), transformer.eval(), text.eval()


@torch.no_grad()
def test_teacher_forcing_equals_the_cached_rollout():
    """One forward over [clean | noisy | extra] gives what chunk by chunk gives, with sliding window, switch and
    padding."""
    _, transformer, text = small_nets()
    layout = Layout(batch=2, chunks=9, extra=1)  # the window is 7 chunks: two of them slide out
    step = TrainStep(transformer, text, layout, nullcontext)
    step.history.normal_(), step.noisy.normal_(), step.sigma.uniform_(0.1, 1)
    sentences = ["a red circle moves left on a white background", "a small square", "the ball is still", "a circle"]
    step.ids.copy_(token_ids(sentences).view(2, 2, -1))
    step.switch_chunk.copy_(torch.tensor([4, layout.chunks]))
    step.padded_to.copy_(torch.tensor([32, 512]))
    at_once = step.forward()

    roller = Roller(transformer)
    texts = [text_inputs(text, step.ids[:, segment], step.padded_to) for segment in (0, 1)]
    for chunk in range(layout.chunks):
        second = step.switch_chunk <= chunk
        now = [torch.where(second.view(-1, *[1] * (b.dim() - 1)), b, a) for a, b in zip(*texts)]
        part = slice(CHUNK * chunk, CHUNK * (chunk + 1))
        alone = roller.velocity(step.noisy[:, :, part], step.sigma[:, chunk], now)
        assert (alone - at_once[:, :, part]).abs().max() < 1e-4
        if chunk == 0:
            extra = roller.velocity(step.noisy[:, :, -CHUNK:], step.sigma[:, -1], now)
            assert (extra - at_once[:, :, -CHUNK:]).abs().max() < 1e-4
        roller.commit(step.history[:, :, part], now)


@torch.no_grad()
def test_padding_bias_equals_real_padding():
    """The one zero key with log(count) is what a pipeline's zero padding does, whatever its length."""
    _, transformer, text = small_nets()
    ids = token_ids(["a green triangle moves up"])
    x = torch.randn(1, CHANNELS, CHUNK, LATENT, LATENT)
    words = int((ids != 0).sum())
    roller = Roller(transformer)
    tokenizer = build_tokenizer()
    for padded_to in (32, 226):
        ours = roller.velocity(x, torch.tensor([0.7]), text_inputs(text, ids, padded_to))
        padding = {"padding": "max_length", "max_length": padded_to}
        batch = tokenizer("A green triangle moves up!", return_tensors="pt", **padding)
        hidden = text(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
        hidden[:, words:] = 0
        padded = roller.velocity(x, torch.tensor([0.7]), (hidden, torch.zeros(1, padded_to)))
        assert (ours - padded).abs().max() < 1e-4


def test_visibility_mask():
    tokens, chunks, window, extra = 2, 4, 3, 1
    mask = dense(visibility(tokens, chunks, window, extra), tokens * (2 * chunks + extra), "cpu")[::tokens, ::tokens]
    for chunk in range(chunks):
        history = {c for c in range(chunks) if chunk - window < c < chunk}
        assert set(mask[chunk].nonzero()[:, 0].tolist()) == history | {chunk}
        assert set(mask[chunks + chunk].nonzero()[:, 0].tolist()) == history | {chunks + chunk}
    assert mask[2 * chunks].nonzero()[:, 0].tolist() == [2 * chunks]


@torch.no_grad()
def test_two_call_vae_equals_the_stock_one():
    vae, _, _ = small_nets(1)
    video = torch.rand(1, 3, 9, 64, 64) * 2 - 1
    stock = vae.encode(video).latent_dist.parameters
    assert torch.allclose(encode(vae, video), stock, atol=1e-4)
    latents = stock.chunk(2, 1)[0]
    assert torch.allclose(decode(vae, latents).clamp(-1, 1), vae.decode(latents).sample, atol=1e-4)


def test_training_ids_are_the_tokenizers_and_unknown_words_are_harmless():
    tokenizer = build_tokenizer()
    sentences = [caption(a) for a in random_attributes(20, torch.Generator().manual_seed(0)).tolist()]
    for sentence, row in zip(sentences, token_ids(sentences).tolist()):
        assert tokenizer(sentence.capitalize() + ".").input_ids == [i for i in row if i]
    assert tokenizer("a dazzling circle").input_ids == [3, 2, 27, 1]


def test_switch_clips_change_at_the_chunk_and_recovering_ones_end_right():
    clips = make_clips(64, 4, torch.Generator().manual_seed(0), switch=0.5, recover=0.5)
    for i in range(64):
        frame = first_frame_of_chunk(int(clips.switch_chunk[i]))
        before, after = clips.video[i, :, frame - 1], clips.video[i, :, frame]
        assert not torch.equal(before, after)
        # Six frames later the look is final: the corner shows the new background.
        wanted = torch.tensor([[245.0] * 3, [15.0] * 3, [128.0] * 3])[clips.attributes[i, 1, 5]] / 127.5 - 1
        assert torch.allclose(clips.video[i, :, frame + 6, 0, 0], wanted, atol=1e-5)
    assert clips.recovers.any() and not clips.recovers.all()


def test_object_weight_is_high_on_the_object_only():
    clean = torch.zeros(1, CHANNELS, CHUNK, LATENT, LATENT)
    clean[..., 2, 3] = 2.0
    weight = object_weight(clean, torch.zeros(1, 1))
    assert weight[0, 0, 0, 2, 3] == 4.0 and weight[0, 0, 0, 0, 0] == 1.0
    assert per_frame(torch.tensor([[1.0, 2.0]])).flatten().tolist() == [1.0] * CHUNK + [2.0] * CHUNK


@torch.no_grad()
def test_rollout_renoises_as_the_scheduler_does():
    """`Roller.denoise` against FlowMatchLCMScheduler, driven by the same noise."""
    from diffusers import FlowMatchLCMScheduler

    _, transformer, text = small_nets(1)
    roller, words = Roller(transformer), text_inputs(text, token_ids(["a red circle"]))
    noise = torch.randn(1, CHANNELS, CHUNK, LATENT, LATENT)
    ours = roller.denoise(noise, words, generator=torch.Generator().manual_seed(1))
    scheduler, generator, x = FlowMatchLCMScheduler(shift=5.0), torch.Generator().manual_seed(1), noise
    scheduler.set_timesteps(sigmas=list(SIGMAS))
    assert torch.allclose(scheduler.timesteps / 1000, torch.tensor(shifted(SIGMAS)), atol=1e-5)
    for t in scheduler.timesteps:
        v = roller.velocity(x, t[None] / 1000, words)
        x = scheduler.step(v, t, x, generator=generator, return_dict=False)[0]
    assert (ours - x).abs().max() < 1e-4


def test_schedule_ends_by_steps_and_decays():
    rates = list(Schedule(steps=10, peak=1.0, warmup=1, flat=0.5))
    assert len(rates) == 10 and rates[0] == 1.0 and rates[-1] < 0.25 and rates == sorted(rates, reverse=True)


def test_smoke_runs_the_whole_recipe_and_resumes(tmp_path):
    import train

    run = train.train(train.parse(["--out", str(tmp_path / "first"), "--smoke"]))
    assert {entry["stage"] for entry in run.log} >= {"vae", "teacher forcing", "own rollouts", "self forcing", "score"}
    for name in ("log.json", "losses.png", "samples.png", "model/model_index.json", "average.pt", "moment2.pt"):
        assert (tmp_path / "first" / name).stat().st_size > 0
    log = json.loads((tmp_path / "first" / "log.json").read_text())
    table = [entry for entry in log if entry.get("name") == "final"][0]
    assert table["prompts"]["clips"] == 2
    assert set(table["switch"]) == {"clips", "color", "background", "direction", "shape"}

    again = ["--out", str(tmp_path / "again"), "--resume", str(tmp_path / "first"), "--smoke", "--own", "0", "--parts"]
    args = train.parse(again)
    assert args.vae == 0
    steps = train.train(args).log
    assert all(entry["stage"] == "teacher forcing" for entry in steps) and len(steps) == 2


def test_checkpoint_brings_weights_and_moments_back(tmp_path):
    import checkpoint

    layout = Layout(batch=2, chunks=2, extra=1)
    vae, transformer, text = small_nets(1)
    first = TrainStep(transformer, text, layout, nullcontext)
    first.noisy.normal_()
    for _ in range(2):
        first.run(1e-3, 0.9)
    checkpoint.save(tmp_path, first, vae)
    _, transformer, text = build(transformer={"num_layers": 1, "ffn_dim": 64})
    second = TrainStep(transformer, text, layout, nullcontext)
    checkpoint.load(tmp_path, second)
    for a, b in zip(first.parameters + first.averages, second.parameters + second.averages):
        assert torch.allclose(a, b, atol=2e-3)
    states = [[step.optimizer.state[p] for p in step.parameters] for step in (first, second)]
    assert all(torch.allclose(a["exp_avg"], b["exp_avg"], rtol=0.01, atol=1e-9) for a, b in zip(*states))
    assert all(b["step"] == 2 for b in states[1])
    second.run(1e-3, 0.9)
