"""What a pipeline does differently when several ranks generate one video."""

import torch

from ..attention.ulysses import UlyssesGroup
from ..distributed import ProcessGrid, make_grid
from ..models import LayerGeometry
from .resources import RolloutGeometry


def share_video(pipe, ulysses_degree: int) -> ProcessGrid:
    """`BlockCausalVideoPipeline.enable_context_parallel`."""
    adapter = pipe._adapter
    if getattr(pipe.transformer, "_parallel_config", None) is not None:
        raise RuntimeError("diffusers' enable_parallelism already splits this transformer: the pipeline uses that, "
                           "enable_context_parallel is the other way and not needed")
    if ulysses_degree != 1 and adapter.sequence_ends() is None:
        raise ValueError(f"the {adapter.family} adapter cannot share a video among ranks: use ulysses_degree=1 and "
                         "give every process videos of its own")
    layers = adapter.layer_geometry(pipe.transformer.config)
    grid = make_grid(ulysses_degree, layers.num_heads, layers.num_kv_heads, torch.device(pipe._execution_device))
    adapter.holder.share_sequence(grid.ulysses)
    adapter.place_hooks()
    return grid


def check_shared(group: UlyssesGroup, geometry: RolloutGeometry, layers: LayerGeometry,
                 latent_frames: int | None) -> None:
    """Refuses heads and lengths that diffusers' hooks, which do not pad, would fail on in the middle of a forward."""
    degree, heads, kv_heads = group.degree, layers.num_heads, layers.num_kv_heads
    for count, what in ((heads, "attention heads"), (kv_heads, "K/V heads")):
        if count % degree:
            works = [d for d in range(1, degree) if heads % d == 0 and kv_heads % d == 0]
            raise ValueError(f"ulysses_degree {degree} does not divide this model's {count} {what}: smaller degrees "
                             f"that do are {', '.join(map(str, works))}")
    if group.pads:
        return
    chunk = geometry.config.chunk_frames
    lengths = {chunk} if latent_frames is None else {min(chunk, latent_frames), latent_frames % chunk or chunk}
    for frames in sorted(lengths, reverse=True):
        tokens = frames * geometry.tokens_per_frame
        if tokens % degree:
            raise ValueError(f"a chunk of {frames} latent frames is {tokens} tokens, which {degree} ranks cannot "
                             "share equally under diffusers' enable_parallelism: use the pipeline's "
                             "enable_context_parallel, which pads, or another size or length")


def agree_on_noise(group: UlyssesGroup, device: torch.device, seed: int, latents: torch.Tensor | None,
                   generator: torch.Generator | None
                   ) -> tuple[int, torch.Tensor | None, torch.Generator | None]:
    """The first rank's noise on all: ranks that denoise different latents would make one broken video."""
    seed = group.broadcast_object(seed, device)
    if latents is not None:
        latents = group.broadcast(latents, device)
        if generator is None:
            own = int(torch.randint(2**62, (1,)))
            generator = torch.Generator(device).manual_seed(group.broadcast_object(own, device))
        else:
            generator.set_state(group.broadcast(generator.get_state(), device))
    return seed, latents, generator
