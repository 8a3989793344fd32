"""`Paged(share_prefixes=True)` where nothing is shared: on the CPU, and in calls that are refused or told why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.ops.attention.problem import Call, make_call
from tilewise.ops.attention.sharing import bytes_of, may_share, remark, requests_of_tile, rows_of_shared_tile
from tilewise.ops.attention.triton_keys import call_key
from tilewise.quant import encode
from tilewise.testing.case import Case
from tilewise.testing.cases import causal
from tilewise.testing.properties import Setting
from tilewise.testing.sharing import alike, shared_prefixes_hold_the_keys


def call_of(
    batch: int = 4, queries: int = 1, heads: int = 8, dim: int = 128, share: bool = True, kind: str | None = None,
    **arguments: Any,
) -> Call:  # fmt: skip
    """Of bfloat16, on two key/value heads."""
    q = torch.zeros(batch, queries, heads, dim, dtype=torch.bfloat16)
    pool: Any = torch.zeros(4, 16, 2, dim, dtype=q.dtype)
    if kind is not None:
        pool = encode(pool, kind)
    table, seqlens = torch.zeros(batch, 4, dtype=torch.int32), torch.full((batch,), 64, dtype=torch.int32)
    layout = arguments.pop("layout", None) or tw.Paged(table, seqlens, share_prefixes=share)
    return make_call(q, pool, pool, layout=layout, **arguments)


@pytest.mark.parametrize("impl", ["cpu_tiled", "reference"])
def test_on_the_cpu_it_changes_nothing(impl: str) -> None:
    case = Case("shared", packed=((2, 300), (2, 310), (2, 0), (2, 90)), heads_q=4, mask=causal)
    shared_prefixes_hold_the_keys(Setting(impl), case, [0, 280, 0, 0])
    batch = alike(Setting(impl), case, [0, 280, 0, 0])
    layout = batch.arguments["layout"]
    plain = batch.arguments | {"layout": tw.Paged(layout.block_table, layout.seqlens_k)}
    with torch.no_grad():
        got, want = (
            tw.attention(batch.q, batch.k, batch.v, impl=impl, **arguments) for arguments in (batch.arguments, plain)
        )
    assert torch.equal(got, want)


def test_not_together_with_batch_invariance() -> None:
    with pytest.raises(InputError, match=r"batch_invariant: got True, for tilewise\.Paged") as error:
        call_of(batch_invariant=True)
    assert "the bits of results" in str(error.value)
    call_of(share=False, batch_invariant=True)


def test_it_is_named() -> None:
    with pytest.raises(TypeError):
        tw.Paged(torch.zeros(1, 1), torch.zeros(1), None, True)  # type: ignore[misc]


def test_calls_that_share_are_planned_for_themselves() -> None:
    assert call_key(call_of()) == call_key(call_of())
    assert call_key(call_of()) != call_key(call_of(share=False))


@pytest.mark.parametrize(
    ("sizes", "portable", "hopper"),
    [
        ({"batch": 2}, (16, 4), (64, 16)),
        ({"batch": 16}, (64, 16), (64, 16)),
        ({"batch": 17}, (64, 16), (128, 32)),
        ({"batch": 100, "heads": 10}, (64, 8), (128, 16)),  # groups of five: 12 would fit, a power of two do
        ({"batch": 3, "queries": 4, "heads": 12}, (64, 2), (128, 4)),
        ({"batch": 9, "heads": 16, "dim": 256}, (32, 4), (64, 8)),
        ({"batch": 4, "heads": 64}, (64, 2), (128, 4)),
    ],
)
def test_rows_of_a_tile(sizes: dict[str, int], portable: tuple[int, int], hopper: tuple[int, int]) -> None:
    """And how many requests have them."""
    call = call_of(**sizes)
    assert may_share(call)
    assert not may_share(call_of(share=False, **sizes))
    for name, want in (("triton_paged", portable), ("hopper_decode", hopper)):
        rows = rows_of_shared_tile(call, name)
        assert (rows, requests_of_tile(call, rows)) == want


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batch": 1}, "there are 1 requests, not 2 to 1024"),
        ({"batch": 1025}, "there are 1025 requests"),
        ({"queries": 9}, "a request has 36 query rows per KV head, above 32"),
        ({"dim": 256, "queries": 5}, "a request has 20 query rows per KV head, above 16"),
        ({"mask": tw.causal & tw.window(100)}, "the mask is not causal"),
        ({"score": tw.alibi(torch.ones(8))}, "the score formula looks at"),
        ({"score": lambda s, b, h, i, j: s + b}, "the score formula looks at"),
    ],
)
def test_why_nothing_is_shared(changes: dict[str, Any], reason: str) -> None:
    call = call_of(**changes)
    assert not may_share(call)
    for name in ("triton_paged", "hopper_decode"):
        assert remark(call, name).startswith(f"; shares no prefix: {reason}")
    assert remark(call, "hopper") == "; share_prefixes changes nothing here"
    assert remark(call_of(share=False), "triton_paged") == ""


def test_why_packed_queries_share_nothing() -> None:
    index = torch.zeros(2, dtype=torch.int32)
    layout = tw.Paged(torch.zeros(1, 4, dtype=torch.int32), index[:1], index, share_prefixes=True)
    pool = torch.zeros(4, 16, 2, 64)
    call = make_call(torch.zeros(0, 8, 64), pool, pool, layout=layout)
    assert remark(call, "triton_paged") == "; shares no prefix: queries are packed"


def test_what_sharing_must_save() -> None:
    """A token of two heads of 128 in bfloat16, twice; and of eight heads 129 numbers of float32, written and read."""
    assert bytes_of(call_of()) == (2 * 2 * 128 * 2, 2 * 8 * 129 * 4)
    assert bytes_of(call_of(queries=3)) == (1024, 3 * 8256)
    assert bytes_of(call_of(kind="int8"))[0] == 2 * 2 * (128 + 4)
    assert bytes_of(call_of(kind="int4"))[0] == 2 * 2 * (64 + 4)
    found = remark(call_of(batch=16, mask=tw.causal, score=tw.softcap(30.0)), "triton_paged")
    assert "16 requests to a tile" in found
    assert found.endswith("two requests from 33 tokens on")
    assert 1024 * 33 > 2 * 2 * 8256 >= 1024 * 32
    narrow = remark(call_of(heads=64, kind="int4"), "triton_paged")  # two rows of 32 for each of half as many bytes
    assert narrow.endswith("two requests never")


def test_why_says_what_a_row_on_the_cpu_makes_of_it() -> None:
    batch = alike(Setting("cpu_tiled"), Case("shared", packed=((1, 300), (1, 310))), [0, 300])
    with torch.no_grad():
        found = tw.why(batch.q, batch.k, batch.v, **batch.arguments)
    verdicts = {name: verdict for name, _, verdict in found.rows}
    assert verdicts["cpu_tiled"].endswith("; share_prefixes changes nothing here")


def test_it_passes_through_the_operator() -> None:
    from tilewise.ops.attention import table, torch_op

    slopes = torch.ones(8, requires_grad=True)
    for share in (True, False):
        call = call_of(share=share, score=tw.alibi(slopes))
        made = torch_op._call(*torch_op.operator_arguments(table.named("cpu_tiled"), call))
        assert made.share_prefixes is share
        assert made.grad_captured == (True,)
