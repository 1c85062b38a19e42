"""What the pipeline needs to know of a VAE, for each kind that it meets."""

import torch
from diffusers import AutoencoderKLWan

from .streaming_decoder import StreamingDecoder, WanStreamingDecoder


def scale_factors(vae) -> tuple[int, int]:
    """(temporal, spatial): pixel frames a latent frame, pixels along an edge a latent pixel."""
    config = getattr(vae, "config", vae)
    if hasattr(config, "scale_factor_temporal"):
        return config.scale_factor_temporal, config.scale_factor_spatial
    return vae.temporal_compression_ratio, vae.spatial_compression_ratio


def make_streaming_decoder(vae) -> StreamingDecoder:
    """A decoder of one video, chunk by chunk.

    Raises:
        TypeError: for a VAE that cannot decode a video chunk by chunk.
    """
    if isinstance(vae, AutoencoderKLWan):
        return WanStreamingDecoder(vae)
    if isinstance(vae, StreamingDecoder):
        vae.reset()
        return vae
    name = type(vae).__name__
    raise TypeError(f"vae {name} cannot decode a stream: it is neither an AutoencoderKLWan nor a StreamingDecoder. A "
                    "decoder that is not causal needs frames that do not exist yet, and would show seams between "
                    "chunks. Use output_type='latent' and decode the joined latents when the rollout has ended, or "
                    "give the pipeline a vae with the interface of StreamingDecoder")


@torch.no_grad()
def encode_frame(vae, pixels: torch.Tensor) -> torch.Tensor:
    """pixels [1, 3, H, W] in [-1, 1] as one normalised latent frame, float32 [1, C, 1, h, w].

    Raises:
        TypeError: for a VAE whose normalisation is not known.
    """
    if not isinstance(vae, AutoencoderKLWan):
        raise TypeError(f"an image can only be encoded with an AutoencoderKLWan, not with {type(vae).__name__}")
    latent = vae.encode(pixels[:, :, None].to(vae.dtype)).latent_dist.mode()
    mean, std = (torch.tensor(values, device=latent.device, dtype=latent.dtype).view(1, -1, 1, 1, 1)
                 for values in (vae.config.latents_mean, vae.config.latents_std))
    return ((latent - mean) / std).float()
