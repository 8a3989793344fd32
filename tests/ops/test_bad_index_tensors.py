"""Index tensors and arguments that no call can have: an error that names them, also inside a transform or a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError, UnsupportedError, shown

ROWS, PAGES = torch.zeros(10, 2, 16), torch.zeros(4, 8, 2, 16)
SUMMARIES = tw.PageSummaries.of(PAGES, PAGES)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def summarize(table: torch.Tensor, seqlens: torch.Tensor) -> None:
    tw.summarize_pages(PAGES, PAGES, SUMMARIES, tw.Paged(table, seqlens))


@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize("function", [tw.attention, tw.why, tw.plan])
def test_a_tuple_that_is_no_pair(function: Callable[..., Any], parts: int) -> None:
    layout: Any = tw.Paged((ints(0, 1),) * parts, ints(5))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=rf"^layout block_table: got a tuple of {parts}"):
        function(ROWS[None, :5], PAGES, PAGES, layout=layout)


@pytest.mark.parametrize("table", [torch.tensor(3, dtype=torch.int32), ints(3)])
def test_a_table_that_is_no_matrix(table: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"^layout block_table: got shape "):
        summarize(table, ints(5))


BATCHED: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "quantize_qkv": (
        lambda x: tw.quantize_qkv(ROWS, ROWS, ROWS, scheme=tw.Sage2(), layout=tw.Packed(x)).q,
        ints(0, 5, 10).expand(2, 3),
    ),
    "summarize_pages, pages": (lambda x: summarize(x, ints(5)), ints(3).expand(2, 1, 1)),
    "summarize_pages, lengths": (lambda x: summarize(ints(3)[None], x), ints(5).expand(2, 1)),
}


@pytest.mark.parametrize("name", BATCHED)
def test_index_tensors_that_vmap_batches(name: str) -> None:
    function, x = BATCHED[name]
    with pytest.raises(UnsupportedError, match=r"^layout: got a tensor that vmap has batched"):
        torch.vmap(function)(x)


@pytest.mark.parametrize("name", ["skale", "causal"])
def test_an_unknown_argument_in_a_compiled_region_is_named(name: str) -> None:
    region: Any = torch.compile(lambda x: tw.attention(x, x, x, **{name: 3}), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=rf"InputError\('{name}'\)"):  # all that Dynamo shows of an error
        region(ROWS[None])


def test_bounds_of_keys_are_answered_by_their_name() -> None:
    with pytest.raises(InputError, match=r"Packed\(cu_seqlens_q, cu_seqlens_k, max_seqlen_k=\.\.\.\)"):
        tw.attention(ROWS, ROWS, ROWS, max_seqlen_k=3)  # type: ignore[arg-type]


def test_why_lists_all_its_arguments() -> None:
    with pytest.raises(InputError, match=r"impl, all\. Hint: did you mean all=\?"):
        tw.why(ROWS, ROWS, ROWS, alll=True)


def test_a_value_that_cannot_be_shown_is_named_by_its_type() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise ValueError

    assert shown(Silent()) == "a Silent"
    with pytest.raises(InputError, match=r"^scale: got a Silent"):
        tw.attention(ROWS[None], ROWS[None], ROWS[None], scale=Silent())  # type: ignore[arg-type]
