"""One optimiser step of the transformer, on fixed buffers, so that on a GPU it is one CUDA graph."""

import copy
from dataclasses import dataclass

import torch
from attention import dense, encode_text, install, padding_bias, rope_tables, visibility
from captions import MAX_WORDS
from pools import CHANNELS, LATENT
from shape_world import CHUNK
from tiny_nets import WINDOW


@dataclass(frozen=True)
class Layout:
    """Sizes of a training batch: `chunks` a clip, `extra` more noisy copies of chunk 0, `batch` clips."""

    batch: int = 64
    chunks: int = 10
    extra: int = 4

    @property
    def slots(self):
        return self.chunks + self.extra

    @property
    def tokens(self):
        return CHUNK * (LATENT // 2) ** 2


class TrainStep:
    """Transformer and text encoder, their averages, their optimiser and the buffers that a stage fills.

    Buffers: `history` [B, C, T, h, w] (the clean half), `noisy` and `target` [B, C, CHUNK * slots, h, w], `weight`
    like them with one channel, `sigma` [B, slots], `ids` [B, 2, L], `switch_chunk` and `padded_to` [B].
    """

    def __init__(self, transformer, text, layout, autocast, compile_blocks=False):
        self.transformer, self.text, self.layout, self.autocast = transformer, text, layout, autocast
        self.device = next(transformer.parameters()).device
        self.average = tuple(copy.deepcopy(net).eval().requires_grad_(False) for net in (transformer, text))
        self.parameters = [*transformer.parameters(), *text.parameters()]
        self.averages = [p for net in self.average for p in net.parameters()]
        cuda = self.device.type == "cuda"
        self.lr = torch.zeros((), device=self.device)
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1]},
            {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        fast = {"fused": True, "capturable": True} if cuda else {}
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.97), weight_decay=0.02, **fast)
        self.flow = install(transformer, "train")
        self._make_masks(flex=compile_blocks)
        self._make_buffers()
        if compile_blocks:
            transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
        self.graph = None

    def _make_masks(self, flex):
        lay, side = self.layout, LATENT // 2
        total = lay.tokens * (lay.chunks + lay.slots)
        visible = visibility(lay.tokens, lay.chunks, WINDOW // CHUNK, lay.extra)
        if flex:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            self.flow.flex = flex_attention
            self.flow.mask = create_block_mask(visible, None, None, total, total, device=self.device)
        else:
            self.flow.mask = dense(visible, total, self.device)
        clip, first = torch.arange(CHUNK * lay.chunks), torch.arange(CHUNK)
        frames = torch.cat([clip, clip, first.repeat(lay.extra)])
        head_dim = self.transformer.config.attention_head_dim
        self.flow.rope = rope_tables(frames, side, side, head_dim, self.device)
        chunk_of_slot = [*range(lay.chunks), *range(lay.chunks), *[0] * lay.extra]
        self.first_chunk = torch.tensor([1.0] + [0.0] * (lay.chunks - 1) + [1.0] * lay.extra, device=self.device)
        self.chunk_of_token = torch.tensor(chunk_of_slot, device=self.device).repeat_interleave(lay.tokens)

    def _make_buffers(self):
        lay, size = self.layout, (LATENT, LATENT)
        new = lambda *shape, dtype=torch.float32: torch.zeros(lay.batch, *shape, dtype=dtype, device=self.device)  # noqa: E731
        self.history = new(CHANNELS, CHUNK * lay.chunks, *size)
        self.noisy = new(CHANNELS, CHUNK * lay.slots, *size)
        self.target = torch.zeros_like(self.noisy)
        self.weight = torch.ones_like(self.noisy[:, :1])
        self.sigma = new(lay.slots)
        self.ids = new(2, MAX_WORDS, dtype=torch.long)
        self.ids[..., 0] = 1
        self.switch_chunk, self.padded_to = new(dtype=torch.long), new(dtype=torch.long) + 32
        self.losses = torch.zeros(3, device=self.device)  # all, chunk 0, later chunks

    def forward(self):
        """Velocity on the noisy half [B, C, CHUNK * slots, h, w]."""
        lay, batch = self.layout, len(self.history)
        clean = torch.zeros(batch, lay.tokens * lay.chunks, device=self.device)
        timestep = torch.cat([clean, (self.sigma * 1000.0).repeat_interleave(lay.tokens, 1)], 1)
        embeddings, words = encode_text(self.text, self.ids.flatten(0, 1))
        bias = padding_bias(words, MAX_WORDS, self.padded_to.repeat_interleave(2)).unflatten(0, (batch, 2))
        # Each token sees the caption of its chunk; both captions lie side by side.
        second = self.chunk_of_token[None] >= self.switch_chunk[:, None]
        hidden = torch.stack([torch.where(second, -1e4, 0.0), torch.where(second, 0.0, -1e4)], -1)
        bias = (hidden[..., None] + bias[:, None]).flatten(2).clamp(min=-1e4)
        self.flow.text_bias = bias[:, None].to(torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        embeddings = embeddings.unflatten(0, (batch, 2)).flatten(1, 2)
        x = torch.cat([self.history, self.noisy], 2)
        out = self.transformer(x, timestep, embeddings, return_dict=False)[0]
        return out[:, :, CHUNK * lay.chunks :].float()

    def _step(self):
        lay = self.layout
        with self.autocast():
            velocity = self.forward()
        error = (velocity - self.target).square().mean(1, keepdim=True) * self.weight
        loss = error.sum() / self.weight.sum().clamp(min=1.0)
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        slot = (error.detach().sum((1, 3, 4)), self.weight.sum((1, 3, 4)))
        per_slot = [part.unflatten(1, (lay.slots, CHUNK)).sum((0, 2)) for part in slot]
        mean = lambda rows: (per_slot[0] * rows).sum() / (per_slot[1] * rows).sum().clamp(min=1.0)  # noqa: E731
        self.losses.copy_(torch.stack([loss.detach(), mean(self.first_chunk), mean(1 - self.first_chunk)]))

    def capture(self):
        """Record the step as a CUDA graph (a few steps at learning rate 0 come first); elsewhere this does nothing."""
        if self.device.type != "cuda":
            return
        self.lr.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.graph = graph

    def run(self, lr, decay):
        """One step at learning rate `lr` on what lies in the buffers; `decay` is the averages' (0.999: about 1000
        steps)."""
        self.lr.fill_(lr)
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, [p.detach() for p in self.parameters], 1 - decay)
