"""The demo's text: the standard library alone, the same every time; and a tokenizer that loses nothing."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.errors import InputError
from tilewise.demo.data import Tokenizer, batches, own_files, read_corpus, stdlib_files


def test_stdlib_files_are_sorted_sources_of_the_running_library_alone() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = stdlib_files()
    parts = [file.relative_to(root).parts for file in files]
    assert len(files) > 100
    assert files == sorted(files)
    assert all(part[-1].endswith(".py") for part in parts)
    assert not any({"test", "tests", "site-packages", "__pycache__"} & set(part) for part in parts)


def test_corpus_is_capped_and_depends_on_the_seed_alone() -> None:
    first, again, other = (read_corpus(max_bytes=200_000, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.train != other.train
    assert 150_000 < first.num_bytes < 210_000
    assert not set(first.train) & set(first.valid)


@pytest.mark.parametrize(("more", "counts"), [({}, (57, 3)), ({"every": 10}, (54, 6))])
def test_a_share_of_the_files_is_held_out(tmp_path: Path, more: dict[str, int], counts: tuple[int, int]) -> None:
    for n in range(60):
        (tmp_path / f"{n:02}.py").write_text(f"x = {n}\n" * 50)
    corpus = read_corpus([tmp_path], max_bytes=10**6, seed=0, **more)
    assert (len(corpus.train), len(corpus.valid)) == counts


@pytest.mark.parametrize(("more", "first"), [({}, 950), ({"every": 10}, 900)])
def test_one_file_is_split_by_lines(tmp_path: Path, more: dict[str, int], first: int) -> None:
    text = "".join(f"line {n}\n" for n in range(1000))
    (tmp_path / "one.txt").write_text(text)
    corpus = read_corpus([tmp_path / "one.txt"], max_bytes=10**6, seed=0, **more)
    assert corpus.train[0] + corpus.valid[0] == text
    assert corpus.valid[0].startswith(f"line {first}\n")


def test_hidden_files_and_other_encodings_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "secret").write_text("hidden " * 1000)
    (tmp_path / "binary.bin").write_bytes(b"\xff\xfe\x00" * 1000)
    (tmp_path / "a.py").write_text("import os\n" * 500)
    (tmp_path / "b.py").write_text("import sys\n" * 500)
    assert [file.name for file in own_files([tmp_path])] == ["a.py", "b.py", "binary.bin"]
    corpus = read_corpus([tmp_path], max_bytes=10**6, seed=0)
    assert sorted(corpus.train + corpus.valid) == ["import os\n" * 500, "import sys\n" * 500]


def test_missing_path_and_too_little_text_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        read_corpus([tmp_path / "nowhere"], max_bytes=1000, seed=0)
    (tmp_path / "short.py").write_text("x = 1\n")
    with pytest.raises(InputError, match="--text"):
        read_corpus([tmp_path], max_bytes=1000, seed=0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(read_corpus(max_bytes=100_000, seed=0).train, 400)


@given(st.text(max_size=200))
def test_tokenizer_gives_every_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_has_the_size_asked_for_and_joins_indentation(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 400
    assert len(tokenizer.encode("\n        return")) < 6


def test_stream_ends_every_text(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream(["a = 1", "b"])
    assert stream.tolist() == [*tokenizer.encode("a = 1"), tokenizer.end, *tokenizer.encode("b"), tokenizer.end]


def test_batches_are_windows_with_targets_one_ahead_in_an_order_of_the_seed() -> None:
    stream = torch.arange(1000)
    first = list(batches(stream, batch=3, seqlen=16, steps=5, seed=1))
    again = list(batches(stream, batch=3, seqlen=16, steps=5, seed=1))
    other = list(batches(stream, batch=3, seqlen=16, steps=5, seed=2))
    assert len(first) == 5
    for (x, y), (x2, _) in zip(first, again, strict=True):
        assert x.shape == y.shape == (3, 16)
        assert torch.equal(y, x + 1)
        assert torch.equal(x, x2)
    assert not all(torch.equal(x, x2) for (x, _), (x2, _) in zip(first, other, strict=True))


def test_every_window_of_the_stream_can_be_drawn() -> None:
    windows = {int(x[0, 0]) for x, _ in batches(torch.arange(6), batch=1, seqlen=4, steps=100, seed=0)}
    assert windows == {0, 1}


def test_a_stream_shorter_than_a_window_is_an_input_error() -> None:
    with pytest.raises(InputError, match="seqlen"):
        next(batches(torch.arange(10), batch=1, seqlen=10, steps=1, seed=0))
