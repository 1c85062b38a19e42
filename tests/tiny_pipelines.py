"""Whole tiny pipelines, as the families' own diffusers classes save them. Random weights, no network."""

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    Cosmos3OmniPipeline,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    SkyReelsV2DiffusionForcingPipeline,
    UniPCMultistepScheduler,
    WanPipeline,
)
from tiny_models import LTX, Cosmos3, SkyReels, Wan
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:"


def t5_tokenizer():
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in LETTERS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
                                   model_max_length=64)


def chat_tokenizer():
    """One token a word, with a chat template."""
    special = ["<unk>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    words = ("system user assistant you are a helpful who will generate videos from give prompt this video is of the "
             "red cat waves sea resolution seconds long and fps . x not").split()
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(special + words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()])
    out = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>",
                                  additional_special_tokens=special[1:])
    out.chat_template = ("{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
                         "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}")
    return out


def wan_vae(channels):
    torch.manual_seed(0)
    return AutoencoderKLWan(
        base_dim=3, z_dim=channels, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.1] * channels, latents_std=[1.5] * channels).eval()


def text_encoder(config, model):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return model(config(**sizes)).eval()


def wan_pipeline(kind, family):
    return kind(tokenizer=t5_tokenizer(), text_encoder=text_encoder(UMT5Config, UMT5EncoderModel), vae=wan_vae(16),
                scheduler=UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
                transformer=family.transformer())


def cosmos3_pipeline():
    return Cosmos3OmniPipeline(
        transformer=Cosmos3().transformer(), text_tokenizer=chat_tokenizer(), vae=wan_vae(4),
        scheduler=UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
        enable_safety_checker=False)


def ltx_pipeline():
    torch.manual_seed(0)
    vae = AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1)).eval()
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=text_encoder(T5Config, T5EncoderModel),
        tokenizer=t5_tokenizer(), transformer=LTX().transformer())


STOCK = {
    "wan": lambda: wan_pipeline(WanPipeline, Wan()),
    "skyreels": lambda: wan_pipeline(SkyReelsV2DiffusionForcingPipeline, SkyReels()),
    "cosmos3": cosmos3_pipeline,
    "ltx": ltx_pipeline,
}
