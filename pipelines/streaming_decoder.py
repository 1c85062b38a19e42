"""Decoding a video chunk by chunk, with the state of the causal convolutions kept between chunks."""

from typing import Protocol, runtime_checkable

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify


@runtime_checkable
class StreamingDecoder(Protocol):
    """What the pipeline asks of a decoder. One object decodes one video at a time.

    Attributes:
        scale_factor_temporal (`int`): pixel frames that a latent frame gives; the first one after a reset gives 1.
        scale_factor_spatial (`int`): pixels along an edge that a latent pixel gives.
    """

    scale_factor_temporal: int
    scale_factor_spatial: int

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode the next frames of the video.

        Args:
            latents (`torch.Tensor`): `[1, C, f, h, w]`, f >= 1, normalised as the transformer makes them (the
                decoder undoes the normalisation itself), of any floating dtype.

        Returns:
            `torch.Tensor`: `[1, 3, F, H, W]` in [-1, 1]; F = `scale_factor_temporal` * f, less
            `scale_factor_temporal` - 1 in the first chunk after a reset.
        """
        ...

    def reset(self) -> None:
        """Forget the video: the next chunk is the first of another one."""
        ...


class WanStreamingDecoder:
    """Decodes with an `AutoencoderKLWan`; any cut into chunks gives the bits of one `vae.decode` of all latents.

    That all cuts agree is certain: every kernel runs on one latent frame. `vae.decode` runs its first, 1x1x1
    convolution on all frames at once, so equality with it asks of the device's library that the result for a pixel
    does not depend on how many there are: so on the CPU from about 10 latent pixels a frame on (below, 1e-6).

    The state is the decoder's own, so `vae.encode` and `vae.decode`, or other streaming decoders of the same VAE, may
    run between two chunks. A chunk that fails (out of memory, say) leaves the state as it was. Tiling is not applied:
    one latent frame is decoded at a time, which is what the memory is needed for.

    Args:
        vae (`AutoencoderKLWan`): of Wan 2.1 or 2.2, or any with the same classes. Not copied, nothing in it changes.
    """

    def __init__(self, vae: AutoencoderKLWan):
        self.vae = vae
        self.scale_factor_temporal = vae.config.scale_factor_temporal
        self.scale_factor_spatial = vae.config.scale_factor_spatial
        self._statistics = {}  # (device, dtype) -> mean and 1 / std
        self.reset()

    def reset(self) -> None:
        self._feat_map = None  # what each causal convolution keeps of the frames it has seen
        self._geometry = None

    @torch.no_grad()
    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        self._check(latents)
        vae = self.vae
        hook = getattr(vae, "_hf_hook", None)
        if hasattr(hook, "pre_forward"):  # model offload: `vae.decode`, which we bypass, brings the weights itself
            hook.pre_forward(vae)
        feat_map = list(self._feat_map or [None] * vae._cached_conv_counts["decoder"])
        first = self._feat_map is None
        latents = self._denormalise(latents.to(vae.dtype))
        frames = []
        for i in range(latents.shape[2]):  # several at once would be right too, but not to the bit
            hidden = vae.post_quant_conv(latents[:, :, i : i + 1])
            frames.append(vae.decoder(hidden, feat_cache=feat_map, feat_idx=[0], first_chunk=first and i == 0))
        video = torch.cat(frames, 2)
        if vae.config.patch_size is not None:
            video = unpatchify(video, patch_size=vae.config.patch_size)
        self._feat_map, self._geometry = feat_map, latents.shape[:2] + latents.shape[3:]
        return video.clamp(-1.0, 1.0)

    def _check(self, latents: torch.Tensor) -> None:
        channels = self.vae.config.z_dim
        if latents.ndim != 5 or latents.shape[1] != channels or latents.shape[2] < 1:
            raise ValueError(
                f"latents must be [1, {channels}, f, h, w] with f >= 1 for this VAE, not {list(latents.shape)}"
            )
        geometry = latents.shape[:2] + latents.shape[3:]
        if self._geometry not in (None, geometry):
            raise ValueError(
                f"a chunk of latents {list(latents.shape)} does not continue a video of [B, C, h, w] = "
                f"{list(self._geometry)}; reset() starts another one"
            )

    def _denormalise(self, latents: torch.Tensor) -> torch.Tensor:
        """As diffusers' Wan pipelines do it, to the bit."""
        key = latents.device, latents.dtype
        if key not in self._statistics:  # once: a copy to the device for every chunk would wait for the device
            config = self.vae.config
            mean, std = (
                torch.tensor(values).view(1, -1, 1, 1, 1).to(latents.device, latents.dtype)
                for values in (config.latents_mean, config.latents_std)
            )
            self._statistics[key] = mean, 1.0 / std
        mean, inverse_std = self._statistics[key]
        return latents / inverse_std + mean
