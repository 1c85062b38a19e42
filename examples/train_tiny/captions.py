"""The grammar of the captions, the vocabulary and the tokenizer.

    a [small|large] COLOR SHAPE (moves DIRECTION [slowly|quickly] | stays still) [on a BACKGROUND background]
"""

import torch
from shape_world import NAMES, STILL, random_attributes


SYNONYMS = {
    "circle": ["ball", "disc"],
    "large": ["big"],
    "small": ["little", "tiny"],
    "quickly": ["fast"],
    "slowly": ["slow"],
    "gray": ["grey"],
    "moves": ["goes", "slides"],
    "a": ["the", "one"],
    "purple": ["violet"],
    "stays": ["is"],
    "still": ["motionless"],
}
# The order is the order of the ids, so it must never change: the text encoder's rows follow it.
_WORDS = "a on background moves stays still it and then turns to video of shape with".split()
_WORDS += [*NAMES["color"], "white", "black", "gray", *NAMES["shape"], *NAMES["size"], *NAMES["speed"]]
_WORDS += ["right", "left", "down", "up"] + [word for words in SYNONYMS.values() for word in words]
VOCABULARY = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *dict.fromkeys(_WORDS)])}
PAD, END, UNKNOWN = 0, 1, 2
MAX_WORDS = 20  # of a training caption, the end token included; the longest sentence of the grammar has 13


def caption(attributes, rng=None):
    """A sentence for one object (six ints). Without `rng` the full sentence; with it words are dropped or replaced.

    Size and speed are named half the time, the background nine times in ten; 15 % of the words that have a synonym
    take one, and one caption in twenty holds an unknown word, so that such words come to mean nothing.
    """
    keep = (lambda rate: True) if rng is None else (lambda rate: rng.random() < rate)
    color, shape, size, speed, direction, background = (NAMES[c][i] for c, i in zip(NAMES, attributes))
    words = ["a", *([size] if keep(0.5) else []), color, shape]
    if attributes[4] == STILL:
        words += ["stays", "still"]
    else:
        words += ["moves", direction, *([speed] if keep(0.5) else [])]
    if keep(0.9):
        words += ["on", "a", background, "background"]
    if rng is not None:
        words = [rng.choice(SYNONYMS[w]) if w in SYNONYMS and rng.random() < 0.15 else w for w in words]
        if rng.random() < 0.05:
            words.insert(rng.randrange(len(words) + 1), "<unk>")
    return " ".join(words)


def token_ids(sentences, device="cpu"):
    """Sentences of the grammar -> int64 [n, MAX_WORDS], padded with 0. Equal to the tokenizer's ids."""
    ids = torch.zeros(len(sentences), MAX_WORDS, dtype=torch.long)
    for row, sentence in zip(ids, sentences):
        words = [VOCABULARY.get(word, UNKNOWN) for word in sentence.split()][: MAX_WORDS - 1]
        row[: len(words) + 1] = torch.tensor([*words, END])
    return ids.to(device)


def clip_ids(clips, rng):
    """Captions of both segments of `shape_world.Clips` -> ids [n, 2, MAX_WORDS]; without a switch both are the same.

    A clip that recovers has the right caption from the start: only its pictures are wrong at first.
    """
    first, second = [], []
    for before, after in clips.attributes.tolist():
        first.append(caption(before, rng))
        second.append(first[-1] if before == after else caption(after, rng))
    device = clips.attributes.device
    return torch.stack([token_ids(first, device), token_ids(second, device)], 1)


def build_tokenizer():
    """A word-level tokenizer (lower case, punctuation dropped) that needs no file: `transformers` saves and loads
    it."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    letters_only = normalizers.Replace(Regex("[^a-z<>/ ]"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), letters_only])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **special)


def held_out_prompts(n, seed=77):
    """Attributes [n, 6] of `n` full sentences that the score is measured on; fewer are the first of 200."""
    return random_attributes(max(n, 200), torch.Generator().manual_seed(seed))[:n]
