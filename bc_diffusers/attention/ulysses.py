"""Ulysses: each rank holds a part of the sequence between the attentions, and a part of the heads inside them.

Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509). Every sequence is cut in equal parts after padding, so shapes
are the same on all ranks and known on the host: the collectives can be captured in a CUDA graph and traced.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name


@dataclass(frozen=True, eq=False)
class UlyssesGroup:
    """The ranks that generate one video together.

    Args:
        group (`torch.distributed.ProcessGroup`): the ranks.
        degree (`int`): how many they are. rank (`int`): the number of this one among them.
        pads (`bool`): whether our own hooks split the sequence; diffusers' do not pad.
    """

    group: dist.ProcessGroup
    degree: int
    rank: int
    pads: bool = True

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can hold its collectives: those of NCCL, where diffusers' hooks, which keep state in
        Python, do not split the sequence. NCCL wants a launch to be captured on all ranks or on none (its user
        guide, "Using NCCL with CUDA Graphs"), so they agree on each capture: see `GraphRunner.refresh`."""
        return self.pads and dist.get_backend(self.group) == "nccl"

    # ------------------------------------------------------------------------------------------------ the sequence
    def split_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of x [1, tokens, ...]: [1, ceil(tokens / degree), ...]. Zeros stand for what is missing."""
        rows = -(-x.shape[1] // self.degree)
        start = min(self.rank * rows, x.shape[1])
        stop = min(start + rows, x.shape[1])
        missing = rows - (stop - start)
        part = x[:, start:stop]
        if not missing:
            return part
        return F.pad(part, (0, 0) * (x.dim() - 2) + (0, missing))

    def join_tokens(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """All ranks' parts x [1, rows, ...] as [1, num_tokens, ...], on every rank."""
        parts = x.new_empty(self.degree * x.shape[1], *x.shape[2:])
        _all_gather(parts, x[0].contiguous(), group=self.group)
        return parts[None, :num_tokens]

    # ------------------------------------------------------------------------------------------------ attention
    def exchange_qkv(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_tokens: int
                     ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From this rank's rows with all heads to all rows with this rank's heads: one collective for the three.

        Args:
            q: [1, rows, heads, head_dim]. k, v: [1, rows, kv_heads, head_dim]; both counts multiples of `degree`.
            num_tokens: rows of the whole sequence without its padding.

        Returns:
            q [1, num_tokens, heads / degree, head_dim], k, v likewise: views of one packed tensor. Query head i still
            attends with K/V head i // (heads / kv_heads), since both are cut in contiguous parts.
        """
        # [degree, rows, heads of that rank: q then k then v, head_dim]
        parts = [x[0].unflatten(1, (self.degree, -1)).transpose(0, 1) for x in (q, k, v)]
        packed = torch.cat(parts, 2)
        received = torch.empty_like(packed)
        dist.all_to_all_single(received, packed, group=self.group)
        rows = received.flatten(0, 1)[None, :num_tokens]
        return rows.split([part.shape[2] for part in parts], 2)

    def exchange_output(self, out: torch.Tensor, rows: int) -> torch.Tensor:
        """The way back: out [1, tokens, heads / degree, head_dim] to this rank's [1, rows, heads, head_dim]."""
        missing = self.degree * rows - out.shape[1]
        if missing:
            out = F.pad(out, (0, 0, 0, 0, 0, missing))
        sent = out[0].contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.unflatten(0, (self.degree, rows)).transpose(0, 1).flatten(1, 2)[None]

    def own_heads(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of x [1, tokens, heads, head_dim]."""
        return x.unflatten(2, (self.degree, -1))[:, :, self.rank]

    # ------------------------------------------------------------------------------------------------ agreement
    def broadcast(self, x: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The first rank's x, on every rank; `device` is one that the group's backend can send from."""
        sent = x.to(device, copy=True)
        dist.broadcast(sent, group_src=0, group=self.group)
        return sent.to(x.device)

    def all_agree(self, yes: bool, device: torch.device) -> bool:
        """Whether `yes` holds on every rank. Waits for them, so it is nothing to ask in every chunk."""
        votes = torch.tensor([int(yes)], dtype=torch.int32, device=device)
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.group)
        return bool(votes.item())

    def broadcast_object(self, value, device: torch.device):
        """The first rank's value (anything that can be pickled), on every rank."""
        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=self.group, device=device)
        return values[0]


def ulysses_group_of(parallel_config) -> UlyssesGroup | None:
    """The group in the config that diffusers' `enable_parallelism` left on a processor.

    Raises:
        ValueError: for ring attention and the `_anything` modes.
    """
    config = parallel_config.context_parallel_config
    if config is None:
        return None
    for name in ("ulysses_anything", "ring_anything"):
        if getattr(config, name, False):
            raise ValueError(f"cached attention does not support {name} (its sizes are read back in every layer): use "
                             "ContextParallelConfig(ulysses_degree=...), or the pipeline's enable_context_parallel, "
                             "which pads")
    if config.ring_degree != 1:
        raise ValueError(f"cached attention supports Ulysses only, got ring_degree {config.ring_degree}: history lies "
                         f"in the cache, which no ring passes on. Use ulysses_degree "
                         f"{config.ring_degree * config.ulysses_degree}")
    group = config._ulysses_mesh.get_group()
    return UlyssesGroup(group, dist.get_world_size(group), dist.get_rank(group), pads=False)


@dataclass(frozen=True)
class SequenceEnds:
    """Where a transformer's tokens are whole for the last time, and where they have to be whole again.

    Args:
        first: the first block; takes the tokens, [1, tokens, channels] or [tokens, channels], as its argument
            `position`, or by `name`.
        last: gives the tokens in the same shape.
    """

    first: torch.nn.Module
    last: torch.nn.Module
    position: int = 0
    name: str = "hidden_states"


class SequenceHooks:
    """Split a transformer's tokens before its first block and join them after its last projection, in cached forwards
    only: a stock pipeline on the same transformer runs whole on every rank. A timestep for each token, [1, tokens] by
    name, is split too.
    """

    def __init__(self, holder, transformer: torch.nn.Module, ends: SequenceEnds):
        self.holder, self.ends = holder, ends
        self._handles = [
            transformer.register_forward_pre_hook(self._split_timestep, with_kwargs=True),
            ends.first.register_forward_pre_hook(self._split, with_kwargs=True),
            ends.last.register_forward_hook(self._join),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _forward(self):
        forward = self.holder.active
        return None if getattr(forward, "plan", None) is None else forward

    def _split_timestep(self, module, args, kwargs):
        forward, timestep = self._forward(), kwargs.get("timestep")
        if forward is None or timestep is None or timestep.dim() != 2:
            return None
        return args, {**kwargs, "timestep": forward.ulysses.split_tokens(timestep)}

    def _split(self, module, args, kwargs):
        forward, at = self._forward(), self.ends.position
        if forward is None:
            return None
        x = args[at] if at < len(args) else kwargs[self.ends.name]
        part = forward.ulysses.split_tokens(x) if x.dim() == 3 else forward.ulysses.split_tokens(x[None])[0]
        if at < len(args):
            return (*args[:at], part, *args[at + 1:]), kwargs
        return args, {**kwargs, self.ends.name: part}

    def _join(self, module, args, output):
        forward = self._forward()
        if forward is None:
            return None
        group, tokens = forward.ulysses, forward.plan.num_tokens
        return group.join_tokens(output, tokens) if output.dim() == 3 else group.join_tokens(output[None], tokens)[0]
