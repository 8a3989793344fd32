"""Text for the demo: the standard library's own source, a byte-level BPE trained on it, batches of token windows."""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewise.core.errors import InputError
from tilewise.core.optional import importing

END = "<|end|>"
EVERY = 20  # files, of which one is held out
# Tests, third-party packages, caches; and tables (character maps, help topics), which are data rather than code.
SKIPPED = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data")
)


@dataclass(frozen=True)
class Corpus:
    """Whole files as strings: `train` and the held-out `valid`; `origin` says in words where they come from."""

    train: tuple[str, ...]
    valid: tuple[str, ...]
    origin: str

    @property
    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.train + self.valid)


def stdlib_files() -> list[Path]:
    """Source files of the standard library that runs this process, sorted by path."""
    found: list[Path] = []
    for folder, below, names in os.walk(sysconfig.get_paths()["stdlib"]):
        below[:] = [name for name in below if name not in SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def own_files(paths: Sequence[Path]) -> list[Path]:
    """The files among `paths` and below the directories among them, sorted; InputError for a path that is not there."""
    found: set[Path] = set()
    for path in paths:
        if path.is_dir():
            below = (p for p in path.rglob("*") if p.is_file())
            found.update(p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts))
        elif path.is_file():
            found.add(path)
        else:
            hint = "leave it out for the standard library of Python"
            raise InputError("text", got=str(path), expected="a file or a directory", hint=hint)
    return sorted(found)


def read_corpus(paths: Sequence[Path] = (), *, max_bytes: int, seed: int, every: int = EVERY) -> Corpus:
    """Read files (UTF-8; others are passed over) in an order shuffled by `seed` until `max_bytes`; hold out one of
    `every`.

    Of a single file as large a share of the lines is held out, the last. Raises InputError when less than 2,000
    characters are found.
    """
    files = own_files(paths) if paths else stdlib_files()
    origin = ", ".join(map(str, paths)) if paths else f"the standard library of Python {sysconfig.get_python_version()}"
    random.Random(seed).shuffle(files)
    texts: list[str] = []
    left = max_bytes
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")[: max(left, 0)]
        except (UnicodeDecodeError, OSError):
            continue
        if text:
            texts.append(text)
            left -= len(text.encode())
        if left <= 0:
            break
    if sum(map(len, texts)) < 2000:
        where = origin if paths else f"{sysconfig.get_paths()['stdlib']} (this Python may ship without its sources)"
        raise InputError(
            "text",
            got=f"{sum(map(len, texts))} characters in {where}",
            expected="at least 2,000 characters of UTF-8",
            hint="give your own with --text FILE_OR_DIRECTORY",
        )
    if len(texts) == 1:
        lines = texts[0].splitlines(keepends=True)
        cut = max(1, len(lines) * (every - 1) // every)
        return Corpus(("".join(lines[:cut]),), ("".join(lines[cut:]),), origin)
    # Files from all over, so that one odd file (a table, say) is not the whole held-out text.
    every = min(every, len(texts))
    train = tuple(text for n, text in enumerate(texts, 1) if n % every)
    return Corpus(train, tuple(texts[every - 1 :: every]), origin)


class Tokenizer:
    """Byte-level BPE (Sennrich et al., 2016; bytes as in GPT-2): every text has tokens and comes back unchanged."""

    def __init__(self, texts: Sequence[str], vocab_size: int) -> None:
        with importing("tokenizers>=0.20", "demo", name="the demo"):
            from tokenizers import Tokenizer as Backend
            from tokenizers import decoders, models, pre_tokenizers, trainers

        self.backend = Backend(models.BPE())
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self.backend.train_from_iterator(texts, trainer)
        self.end = self.encode(END)[0]
        self.vocab_size: int = self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.backend.decode(list(tokens))
        return text

    def stream(self, texts: Sequence[str]) -> Tensor:
        """All texts as one (num_tokens,) int64 tensor, each followed by the end token."""
        tokens = [token for e in self.backend.encode_batch(list(texts)) for token in (*e.ids, self.end)]
        return torch.tensor(tokens, dtype=torch.int64)


def batches(stream: Tensor, *, batch: int, seqlen: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` pairs (inputs, targets), each (batch, seqlen), windows of `stream` at places drawn from `seed` alone."""
    if stream.numel() < seqlen + 2:
        raise InputError(
            "text",
            got=f"{stream.numel()} tokens",
            expected=f"more than {seqlen + 1}",
            hint="give more text or a shorter --seqlen",
        )
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        start = torch.randint(stream.numel() - seqlen, (batch,), generator=draw)
        window = stream[start[:, None] + torch.arange(seqlen + 1)]
        yield window[:, :-1], window[:, 1:]
