# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer with merges, special tokens and a chat template; and one of characters."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if not loop.last or not continue_final %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>", "<|user|>", "<|assistant|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["hello world, the quick brown fox stops here"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_character_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece makes them: words begin with a mark for their space, which is not shown at
    the beginning of a text, and what has no token is bytes."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁eht",
        "▁t",
        "he",
        "▁the",
        "the",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("t", "he")]
    vocab = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    marked = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(marked)
    shown = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*shown, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
