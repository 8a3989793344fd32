"""Bad input of `merge` and `merge_states`: an exception of the library's own, before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError, UnsupportedError


def state(*shape: int, dtype: torch.dtype = torch.float32, lse: torch.dtype | None = None) -> Any:
    """(o, lse) of this shape of o."""
    wide = lse or (torch.float64 if dtype == torch.float64 else torch.float32)
    return torch.zeros(shape, dtype=dtype), torch.zeros(*shape[:-3], shape[-2], shape[-3], dtype=wide)


GOOD = state(2, 5, 3, 8)
META = tuple(x.to("meta") for x in GOOD)

# name of the problem -> (states, what the error's `name` is, what `got` contains)
BAD_STATES: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "none": ((), "states", "none"),
    "a_tensor": ((GOOD[0], GOOD[1]), "state 0", "Tensor"),
    "three": ((GOOD, (*GOOD, None)), "state 1", "tuple"),
    "o_a_list": (((GOOD, [1.0]), GOOD), "o of state 0", "tuple"),
    "lse_missing": ((GOOD, (GOOD[0], None)), "lse of state 1", "NoneType"),
    "one_alone": (((GOOD[0], None),), "lse", "NoneType"),
    "sparse": (((GOOD[0].to_sparse(), GOOD[1]), GOOD), "o of state 0", "sparse"),
    "rank_5": ((state(1, 2, 5, 3, 8),), "o", "(1, 2, 5, 3, 8)"),
    "rank_2": (((torch.zeros(5, 8), torch.zeros(5)),), "o", "(5, 8)"),
    "head_dim_0": ((state(2, 5, 3, 0),), "o", "(2, 5, 3, 0)"),
    "other_rows": ((GOOD, state(2, 4, 3, 8)), "o of state 1", "(2, 4, 3, 8)"),
    "other_heads": ((GOOD, state(2, 5, 4, 8)), "o of state 1", "(2, 5, 4, 8)"),
    "other_device": ((GOOD, META), "o of state 1", "meta"),
    "lse_elsewhere": ((GOOD, (GOOD[0], META[1])), "lse of state 1", "meta"),
    "lse_rows_first": ((GOOD, (GOOD[0], GOOD[1].transpose(1, 2))), "lse of state 1", "(2, 5, 3)"),
    "lse_half": ((state(2, 5, 3, 8, lse=torch.float16),), "lse", "torch.float16"),
    "lse_float64": ((state(2, 5, 3, 8, lse=torch.float64),), "lse", "torch.float64"),
    "lse_float32_of_float64": ((state(2, 5, 3, 8, dtype=torch.float64, lse=torch.float32),), "lse", "torch.float32"),
    "integers": (((GOOD[0].long(), GOOD[1]), GOOD), "o of state 0", "torch.int64"),
    "float64_beside_float32": ((GOOD, state(2, 5, 3, 8, dtype=torch.float64)), "o of state 1", "torch.float64"),
    "strides": (((torch.zeros(2, 5, 8, 3).transpose(2, 3), GOOD[1]),), "o", "strides"),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_bad_states(name: str) -> None:
    states, what, got = BAD_STATES[name]
    with pytest.raises(InputError) as caught:
        tw.merge(*states)
    assert caught.value.name == what
    assert got in str(caught.value.got)
    assert all((caught.value.expected, caught.value.hint))


ROWS = state(6, 3, 8)
INT32 = torch.int32


def ends(*values: int, dtype: torch.dtype = INT32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


BAD_JOINED: dict[str, tuple[tuple[Any, Any], dict[str, Any], str, str]] = {
    "not_stacked": (ROWS, {}, "o", "(6, 3, 8)"),
    "stacked_with_indptr": (GOOD, {"indptr": ends(0, 2)}, "o", "(2, 5, 3, 8)"),
    "lse_elsewhere": ((torch.zeros(2, 5, 3, 8)[None], META[1][None]), {}, "lse", "meta"),
    "lse_shape": ((GOOD[0], GOOD[1][:, :2]), {}, "lse", "(2, 2, 5)"),
    "indptr_list": (ROWS, {"indptr": [0, 6]}, "indptr", "list"),
    "indptr_rank": (ROWS, {"indptr": ends(0, 6)[None]}, "indptr", "(1, 2)"),
    "indptr_no_entry": (ROWS, {"indptr": ends()}, "indptr", "(0,)"),
    "indptr_floats": (ROWS, {"indptr": ends(0, 6, dtype=torch.float32)}, "indptr", "torch.float32"),
    "indptr_beyond_32_bits": (ROWS, {"indptr": ends(0, 2**32 + 6, dtype=torch.int64)}, "indptr", "last 2147483647"),
    "indptr_elsewhere": (ROWS, {"indptr": ends(0, 6).to("meta")}, "indptr", "meta"),
    "indptr_strided": (ROWS, {"indptr": ends(0, 1, 6, 6)[::2]}, "indptr", "stride 2"),
    "indptr_from_1": (ROWS, {"indptr": ends(1, 6)}, "indptr", "first 1, last 6"),
    "indptr_short": (ROWS, {"indptr": ends(0, 5)}, "indptr", "first 0, last 5"),
    "indptr_long": (ROWS, {"indptr": ends(0, 7)}, "indptr", "first 0, last 7"),
    "indptr_falls": (ROWS, {"indptr": ends(0, 4, 3, 6)}, "indptr", "3 after 4"),
    "dtype": (GOOD, {"dtype": torch.int32}, "dtype", "torch.int32"),
    "dtype_float64": (GOOD, {"dtype": torch.float64}, "dtype", "torch.float64"),
    "dtype_word": (GOOD, {"dtype": "float32"}, "dtype", "'float32'"),
    "impl": (GOOD, {"impl": "nope"}, "impl", "'nope'"),
}


@pytest.mark.parametrize("name", BAD_JOINED)
def test_bad_joined_states(name: str) -> None:
    (o, lse), arguments, what, got = BAD_JOINED[name]
    with pytest.raises(InputError) as caught:
        tw.merge_states(o, lse, **arguments)
    assert caught.value.name == what
    assert got in str(caught.value.got)


def test_float64_stays_float64() -> None:
    o, lse = state(2, 5, 3, 8, dtype=torch.float64)
    with pytest.raises(InputError, match=r"dtype: got torch\.float32; expected None or one of torch\.float64"):
        tw.merge((o, lse), dtype=torch.float32)


def test_indptr_is_checked_again_after_a_change_in_place() -> None:
    indptr = ends(0, 2, 6)
    tw.merge_states(*ROWS, indptr=indptr)
    indptr[1] = 7
    with pytest.raises(InputError, match="indptr: got 6 after 7"):
        tw.merge_states(*ROWS, indptr=indptr)


def test_what_cannot_run_raises_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match=r"impl='triton'.*expected an NVIDIA GPU .*got cpu"):
        tw.merge(GOOD, impl="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    double = state(2, 5, 3, 8, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=r"dtype float16, bfloat16, float32 \(got torch\.float64\)"):
        tw.merge(double, impl="triton")
