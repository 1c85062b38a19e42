"""The networks: stock diffusers and transformers classes in tiny sizes, and a folder of them loaded or saved."""

from pathlib import Path

import torch
from captions import END, PAD, VOCABULARY, build_tokenizer


SHIFT = 5.0
# Before the shift, as a scheduler takes them. Six passes: small objects need the early ones, corners the late ones.
SIGMAS = (1.0, 0.85, 0.6, 0.35, 0.15, 0.05)
WINDOW = 21  # latent frames a chunk sees, itself included

VAE_CONFIG = {
    "base_dim": 16,
    "decoder_base_dim": 16,
    "z_dim": 8,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 8,
    "latents_mean": [0.0] * 8,
    "latents_std": [1.0] * 8,
}
TRANSFORMER_CONFIG = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "in_channels": 8,
    "out_channels": 8,
    "text_dim": 64,
    "freq_dim": 64,
    "ffn_dim": 448,
    "num_layers": 6,
    "cross_attn_norm": True,
}
TEXT_CONFIG = {
    "vocab_size": len(VOCABULARY),
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "pad_token_id": PAD,
    "eos_token_id": END,
    "dropout_rate": 0.0,
}


def shifted(sigmas, shift=SHIFT):
    """The noise levels that a flow-matching scheduler makes of `sigmas`."""
    return tuple(shift * s / (1 + (shift - 1) * s) for s in sigmas)


def build(device="cpu", transformer=None):
    """Fresh networks in float32 -> (vae, transformer, text encoder). `transformer` overrides parts of its config."""
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    nets = (
        AutoencoderKLWan(**VAE_CONFIG),
        WanTransformer3DModel(**{**TRANSFORMER_CONFIG, **(transformer or {})}),
        UMT5EncoderModel(UMT5Config(**TEXT_CONFIG)),
    )
    return tuple(net.to(device) for net in nets)


def load(folder, device="cpu"):
    """The networks of a pipeline folder, in float32 -> (vae, transformer, text encoder)."""
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5EncoderModel

    folder = Path(folder)
    if not (folder / "transformer").is_dir():
        raise FileNotFoundError(f"{folder} is not a pipeline folder: it has no transformer/")
    vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32)
    transformer = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=torch.float32)
    text = UMT5EncoderModel.from_pretrained(folder, subfolder="text_encoder", dtype=torch.float32)
    return tuple(net.to(device).float() for net in (vae, transformer, text))


def save(folder, vae, transformer, text):
    """Write a stock WanPipeline folder in float16 safetensors; returns its size in bytes."""
    import copy

    from diffusers import FlowMatchLCMScheduler, WanPipeline

    vae, transformer, text = (copy.deepcopy(net).cpu().half() for net in (vae, transformer, text))
    scheduler = FlowMatchLCMScheduler(shift=SHIFT)
    parts = {"text_encoder": text, "vae": vae, "transformer": transformer}
    pipe = WanPipeline(tokenizer=build_tokenizer(), scheduler=scheduler, **parts)
    pipe.save_pretrained(folder, safe_serialization=True)
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def latent_statistics(vae, like):
    """-> mean, std of the latents per channel, shaped to broadcast over [n, C, T, h, w]."""
    shape = (1, -1, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(like)
    return mean, torch.tensor(vae.config.latents_std).view(shape).to(like)


def encode(vae, video):
    """video [n, 3, T, H, W] in [-1, 1] -> the posterior's mean and log variance [n, 2 C, T', h, w], not normalised.

    The same as `vae.encode`, in two calls (first frame, all others) instead of one a latent frame.
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

    x = patchify(video, vae.config.patch_size)
    cache = [None] * vae._cached_conv_counts["encoder"]
    parts = [vae.encoder(x[:, :, :1], feat_cache=cache, feat_idx=[0])]
    if x.shape[2] > 1:
        parts.append(vae.encoder(x[:, :, 1:], feat_cache=cache, feat_idx=[0]))
    return vae.quant_conv(torch.cat(parts, 2))


def decode(vae, latents):
    """The inverse of `encode`: latents [n, C, T', h, w], not normalised -> video [n, 3, T, H, W], not clamped."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    x = vae.post_quant_conv(latents)
    cache = [None] * vae._cached_conv_counts["decoder"]
    parts = [vae.decoder(x[:, :, :1], feat_cache=cache, feat_idx=[0], first_chunk=True)]
    if x.shape[2] > 1:
        parts.append(vae.decoder(x[:, :, 1:], feat_cache=cache, feat_idx=[0]))
    return unpatchify(torch.cat(parts, 2), vae.config.patch_size)


@torch.no_grad()
def decode_normalised(vae, latents, batch=32):
    """Normalised latents -> video [n, T, 3, H, W] in [0, 1], as `measure` wants it."""
    mean, std = latent_statistics(vae, latents)
    parts = [decode(vae, part * std + mean).float() for part in latents.split(batch)]
    return (torch.cat(parts).clamp(-1, 1) / 2 + 0.5).transpose(1, 2)
