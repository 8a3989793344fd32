"""Small tokenizers of the kinds that models have."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

TEXT = [
    "The quick brown fox jumps over the lazy dog. It doesn't stop, does it? No: 12 345.",
    "Grüße aus Köln, déjà vu, naïve café. Δοκιμή. Проверка слов.",
    "你好。世界。这是一个测试。 日本語のテスト、ひらがな。 안녕하세요 🙂🚀👩‍👩‍👧",
    "def f(x):\n    return  x + 1\t# tabs\tand  spaces\n\n",
] * 3
SPECIAL = ["<|start|>", "<|end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Any:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens([AddedToken("<tool→é>", normalized=False)])  # with letters that are no bytes' own
    return backend


def metaspace() -> Any:
    """SentencePiece's unigrams, as T5 and XLM-R have them."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return backend


def byte_fallback() -> Any:
    """SentencePiece's BPE with tokens for bytes, as Llama 2 and Mistral have it."""
    pieces = ["<unk>", *SPECIAL, *BYTES, "▁", *"abcdefghijklmnopqrstuvwxyzT.,ü你", "th", "▁th", "▁the", "in", "▁▁"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("i", "n"), ("▁", "▁")]
    backend = Backend(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


def word_piece() -> Any:
    """BERT's."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"[.,']"), "isolated")]
    )
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=[*SPECIAL, "<unk>"], show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    return backend


KINDS = {"byte_level": byte_level, "metaspace": metaspace, "byte_fallback": byte_fallback, "word_piece": word_piece}
