"""Names of the weights: Wan's own, diffusers', and what training wrappers put around them."""

import re


# Components that FSDP, activation checkpointing, torch.compile, DDP and PEFT insert, anywhere in a key.
_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module", "module",
             "base_layer"}
# Modules that hold the transformer, in front of its own names.
_HOLDERS = {"model", "generator", "generator_ema", "diffusion_model", "base_model", "transformer"}

_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k",
              "k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}
# In a block. The two libraries number the norms differently: Wan's norm3 is the one before cross-attention.
_IN_BLOCK = {
    **{f"self_attn.{wan}": f"attn1.{name}" for wan, name in _ATTENTION.items() if not wan.endswith("_img")},
    **{f"cross_attn.{wan}": f"attn2.{name}" for wan, name in _ATTENTION.items()},
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "modulation": "scale_shift_table",
}
_OUTSIDE = {
    "patch_embedding": "patch_embedding",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_COMPUTED = {"freqs"}  # a rotary table that some files carry; it is computed
_BLOCK = re.compile(r"(blocks\.\d+\.)(.+)")
_KOHYA = re.compile(r"lora_unet_blocks_(\d+)_(self_attn|cross_attn|ffn)_(\w+)")


def clean_key(key: str) -> str:
    """Without wrapper components wherever they stand, and without the modules that held the transformer."""
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] in _HOLDERS:
        parts = parts[1:]
    return ".".join(parts)


def is_lora_key(key: str) -> bool:
    return "lora_" in key


def module_to_diffusers(module: str) -> str | None:
    """diffusers' name of one of Wan's modules (or lone parameters); `None` for an unknown one."""
    block = _BLOCK.fullmatch(module)
    if block is None:
        return _OUTSIDE.get(module)
    inner = _IN_BLOCK.get(block[2])
    return None if inner is None else block[1] + inner


def key_to_diffusers(key: str) -> str | None:
    """diffusers' name of one of Wan's parameters; `None` for an unknown one."""
    whole = module_to_diffusers(key)
    if whole is not None:
        return whole
    module, _, kind = key.rpartition(".")
    module = module_to_diffusers(module)
    return None if module is None else f"{module}.{kind}"


def kohya_module(name: str) -> str:
    """`lora_unet_blocks_0_self_attn_q` to `blocks.0.self_attn.q`; other names as they are."""
    match = _KOHYA.fullmatch(name)
    return name if match is None else f"blocks.{match[1]}.{match[2]}.{match[3]}"


def layout_of(keys) -> str | None:
    """`"diffusers"`, `"wan"` (the original names) or `None`."""
    for key in keys:
        if ".attn1." in key or ".attn2." in key or key.startswith("condition_embedder."):
            return "diffusers"
        if ".self_attn." in key or ".cross_attn." in key or key.startswith("time_embedding."):
            return "wan"
    return None


def is_computed(key: str) -> bool:
    return key in _COMPUTED
