"""Prompts that go through a separate text encoder."""

import torch


@torch.no_grad()
def encode_text(prompt: str, tokenizer, text_encoder, length: int, device: torch.device, masked: bool = True
                ) -> tuple[torch.Tensor, torch.Tensor]:
    """The text encoder's last hidden state [1, length, dim] and the attention mask [1, length]; the prompt is cut or
    padded to `length` tokens.

    Args:
        masked (`bool`, *optional*, defaults to `True`): whether the encoder knows the mask. Some models were trained
            with an encoder that attends to the padding too.

    Raises:
        ValueError: if the pipeline has no tokenizer or no text encoder.
    """
    if tokenizer is None or text_encoder is None:
        raise ValueError("this pipeline was loaded without a tokenizer and a text encoder: pass `prompt_embeds`")
    inputs = tokenizer([prompt], padding="max_length", max_length=length, truncation=True, add_special_tokens=True,
                       return_attention_mask=True, return_tensors="pt")
    ids, mask = inputs.input_ids.to(device), inputs.attention_mask.to(device)
    return text_encoder(ids, mask if masked else None).last_hidden_state, mask
