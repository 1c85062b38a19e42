"""Small random Wan models, built offline: real classes, real geometry rules, a few thousand parameters."""

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from bc_diffusers import BlockCausalKVCache, RolloutSpec


HEIGHT, WIDTH = 6, 10  # latent pixels: 15 tokens a frame
FRAME = (HEIGHT // 2) * (WIDTH // 2)
PROMPT = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(5))


def small_tokenizer() -> PreTrainedTokenizerFast:
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    words += [(c, -3.0) for c in letters] + [("▁" + c, -3.5) for c in letters]
    tokenizer = Tokenizer(models.Unigram(words, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
                                   model_max_length=512)


def small_text_encoder(vocab_size: int) -> UMT5EncoderModel:
    torch.manual_seed(0)
    return UMT5EncoderModel(UMT5Config(vocab_size=vocab_size, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                       feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1)).eval()


def small_transformer(**changes) -> WanTransformer3DModel:
    config = {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16,
              "out_channels": 16, "text_dim": 32, "freq_dim": 32, "ffn_dim": 32, "num_layers": 2,
              "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024}
    torch.manual_seed(0)
    model = WanTransformer3DModel(**{**config, **changes}).eval()
    for name, parameter in model.named_parameters():  # norms start at 1: make a mix-up of them visible
        if name.endswith(("norm_q.weight", "norm_k.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def small_vae(**changes) -> AutoencoderKLWan:
    config = {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
              "temperal_downsample": [False, True, True]}
    torch.manual_seed(0)
    return AutoencoderKLWan(**{**config, **changes}).eval()


def small_wan_pipeline(**transformer_changes) -> WanPipeline:
    """A stock pipeline as published Wan folders are: UniPC scheduler, no word of a rollout. Pixels in units of 16."""
    tokenizer = small_tokenizer()
    pipe = WanPipeline(tokenizer=tokenizer, text_encoder=small_text_encoder(len(tokenizer)), vae=small_vae(),
                       transformer=small_transformer(**transformer_changes),
                       scheduler=UniPCMultistepScheduler(flow_shift=5.0, use_flow_sigmas=True,
                                                         prediction_type="flow_prediction"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def open_cache(chunk, block, window, sink, page_size=16, layers=2, heads=2, head_dim=12) -> BlockCausalKVCache:
    """A cache for `small_transformer`, opened for a rollout given in latent frames."""
    spec = RolloutSpec(window * FRAME, chunk * FRAME, {chunk * FRAME: 1, block * FRAME: -(-chunk // block)},
                       sink * FRAME)
    cache = BlockCausalKVCache(num_layers=layers, num_kv_heads=heads, head_dim=head_dim, page_size=page_size,
                               pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, page_size), dtype=torch.float32,
                               device="cpu")
    return cache.open(spec, sink * FRAME)
