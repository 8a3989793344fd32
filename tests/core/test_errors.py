"""Every exception names what is wrong, what came, what was expected and what to do."""

from __future__ import annotations

import pickle

import pytest

from tilewise.core.errors import (
    FormulaError,
    InputError,
    MissingExtraError,
    OutOfPagesError,
    TilewiseError,
    UnsupportedError,
    caller_line,
    shown,
)


@pytest.mark.parametrize(
    ("kind", "builtins"),
    [
        (InputError, (ValueError,)),
        (FormulaError, (TypeError, ValueError)),
        (UnsupportedError, (NotImplementedError,)),
        (OutOfPagesError, (MemoryError,)),
        (MissingExtraError, (ImportError,)),
    ],
)
def test_kinds_are_the_librarys_and_pythons(kind: type[TilewiseError], builtins: tuple[type[Exception], ...]) -> None:
    error = kind("q", got="rank 2", expected="rank 4", hint="unsqueeze it")
    assert isinstance(error, TilewiseError)
    assert isinstance(error, builtins)
    assert (error.name, error.got, error.expected, error.hint) == ("q", "rank 2", "rank 4", "unsqueeze it")
    assert str(error) == "q: got rank 2; expected rank 4. Hint: unsqueeze it"


@pytest.mark.parametrize(
    "kind", [TilewiseError, InputError, FormulaError, UnsupportedError, OutOfPagesError, MissingExtraError]
)
def test_another_process_gets_the_same(kind: type[TilewiseError]) -> None:
    """A pool of processes waits for ever for an error that cannot be sent."""
    error = kind("q", got=3, expected="rank 4", hint="unsqueeze it")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.name, again.hint) == (kind, str(error), "q", "unsqueeze it")


@pytest.mark.parametrize("kind", [InputError, FormulaError, UnsupportedError, MissingExtraError])
def test_no_error_can_be_made_without_a_hint(kind: type[TilewiseError]) -> None:
    with pytest.raises(TypeError, match="hint"):
        kind("scale", got=float("nan"), expected="a finite number")  # type: ignore[call-arg]


def test_the_line_named_is_the_users() -> None:
    assert caller_line().startswith(__file__ + ":")


@pytest.mark.parametrize("field", ["name", "got", "expected", "hint"])
def test_messages_are_short_and_end_with_the_hint(field: str) -> None:
    parts = {"name": "mask", "got": "this", "expected": "that", "hint": "so"} | {field: "x" * 10**6}
    error = InputError(parts.pop("name"), **parts)
    assert len(str(error)) < 4000
    assert "xxx..." in str(error)
    assert str(error).endswith("..." if field == "hint" else "Hint: so")


def test_what_no_message_could_hold_is_shown() -> None:
    rows = [[0] * 10**6] * 10**6  # written out these were terabytes
    assert len(shown(rows)) < 1000
    assert shown(10**5000) == f"an integer of {(10**5000).bit_length()} bits"  # Python writes none so long
    assert len(shown([10**5000, "x" * 10**6, {"a": rows}])) < 2000
    assert shown((1, -2.5, "a", None, True)) == "(1, -2.5, 'a', None, True)"
