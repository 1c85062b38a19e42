"""The processes of a launch as a grid: data groups that make different videos, of Ulysses ranks that share one."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..attention.ulysses import UlyssesGroup


@dataclass(frozen=True, eq=False)
class ProcessGrid:
    """Where this process stands.

    Attributes:
        processes (`int`), rank (`int`): of the whole launch.
        ulysses_degree (`int`): ranks that share a video; consecutive ranks, so those of one node first.
        device (`torch.device`): this process' own.
        ulysses (`UlyssesGroup`): what the attention exchanges with; None for a degree of 1.
    """

    processes: int
    rank: int
    ulysses_degree: int
    device: torch.device
    ulysses: UlyssesGroup | None

    @property
    def groups(self) -> int:
        """Videos that are made at a time."""
        return self.processes // self.ulysses_degree

    @property
    def group(self) -> int:
        """The number of this process' data group."""
        return self.rank // self.ulysses_degree

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def has_frames(self) -> bool:
        """Whether this process decodes its group's videos (the others of the group hold latents only)."""
        return self.rank % self.ulysses_degree == 0

    def share(self, items: Sequence) -> list:
        """This group's part of `items`, the same on all its ranks; any number of items can be shared."""
        return list(items[self.group::self.groups])


def launched() -> bool:
    """Whether a launcher (accelerate launch, torchrun) started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def check_degree(degree: int, processes: int, heads: int, kv_heads: int) -> None:
    """Raises a ValueError that names the degrees that would work."""
    works = [d for d in range(1, processes + 1) if processes % d == 0 and heads % d == 0 and kv_heads % d == 0]
    advice = f"with {processes} processes the degrees that work are {', '.join(map(str, works))}"
    if not isinstance(degree, int) or degree < 1:
        raise ValueError(f"the Ulysses degree must be a whole number of at least 1, got {degree!r}; {advice}")
    if processes % degree:
        raise ValueError(f"the Ulysses degree {degree} does not divide the {processes} processes; {advice}")
    for count, what in ((heads, "attention heads"), (kv_heads, "K/V heads")):
        if count % degree:
            raise ValueError(f"the Ulysses degree {degree} does not divide this model's {count} {what}; {advice}")


def join_launch(cpu: bool = False) -> None:
    """Initialises the process group of the launch this process belongs to, if there is one and nobody has.

    Args:
        cpu (`bool`): compute on the CPU (gloo), also where there are GPUs.
    """
    if launched():
        from accelerate import PartialState

        PartialState(cpu=cpu)


def make_grid(ulysses_degree: int, heads: int, kv_heads: int, device: torch.device) -> ProcessGrid:
    """The grid of this launch. All its processes must call this, with the same degree.

    Args:
        ulysses_degree (`int`): ranks that share a video; divides the processes, `heads` and `kv_heads`.
        heads, kv_heads (`int`): of the model's self-attention.
        device (`torch.device`): where this process computes.

    Raises:
        ValueError: for a degree that does not work; the message names those that do.
    """
    join_launch(cpu=device.type == "cpu")
    running = dist.is_available() and dist.is_initialized()
    processes, rank = (dist.get_world_size(), dist.get_rank()) if running else (1, 0)
    check_degree(ulysses_degree, processes, heads, kv_heads)
    group = _ulysses_group(dist.group.WORLD, device.type, ulysses_degree) if ulysses_degree > 1 else None
    return ProcessGrid(processes, rank, ulysses_degree, device, group)


@functools.lru_cache(maxsize=None)  # communicators are made once: NCCL gives their memory back to nobody
def _ulysses_group(world: dist.ProcessGroup, device_type: str, degree: int) -> UlyssesGroup:
    shape = (dist.get_world_size(world) // degree, degree)
    mesh = dist.init_device_mesh(device_type, shape, mesh_dim_names=("data", "ulysses"))["ulysses"]
    return UlyssesGroup(mesh.get_group(), degree, mesh.get_local_rank())
