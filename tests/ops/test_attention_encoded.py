"""Encoded keys and values in pages: what holds on the CPU, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.ops.attention import problem, table, torch_op
from tilewise.ops.attention.problem import make_call
from tilewise.quant import KINDS, Encoded, decode, encode
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import Inputs, make_inputs
from tilewise.testing.paging import encoded, paged
from tilewise.testing.properties import Setting

NAMES = ("plain", "alibi_causal", "softcap_causal", "mqa", "packed_cross_causal", "packed_window_sink", "sink_causal")
ALL = st.tuples(st.integers(0, 9), st.integers(0, 70))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("impl", ["cpu_tiled", "reference"])
def test_codes_hold_the_keys(impl: str, name: str, kind: str) -> None:
    page_size = 16 if impl == "reference" else (1, 5, 16)[len(name) % 3]
    properties.encoded_pages_hold_the_keys(Setting(impl), CASES[name], kind, page_size, flat=page_size == 5)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(ALL, min_size=1, max_size=5),
    kind=st.sampled_from(list(KINDS)),
    page_size=st.integers(1, 33),
    flat=st.booleans(),
    group=st.integers(1, 4),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_lengths(
    lengths: list[tuple[int, int]], kind: str, page_size: int, flat: bool, group: int, dtype: torch.dtype
) -> None:
    case = Case("any", packed=tuple(lengths), heads_q=2 * group, head_dim=10, head_dim_v=6, mask=None, sink=group == 3)
    properties.encoded_pages_hold_the_keys(Setting("cpu_tiled", dtype), case, kind, page_size, flat)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_any_size_give_the_same_bits(kind: str) -> None:
    """Of one token and of 16, in another order."""
    inputs = make_inputs(CASES["packed_cross_causal"], torch.float32)
    outputs = []
    for page_size, seed in ((1, 0), (16, 0), (16, 1)):
        pool = paged(inputs, page_size, seed=seed)
        outputs.append(_attend(inputs, encoded(pool.k, kind), encoded(pool.v, kind), pool.layout))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def _attend(inputs: Inputs, k: Any, v: Any, layout: tw.Paged) -> torch.Tensor:
    with torch.no_grad():
        return tw.attention(inputs.q, k, v, **(inputs.arguments() | {"layout": layout}))


def test_a_scale_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_page(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return decode(Encoded(data, scale[:, :1].expand_as(scale)))

    monkeypatch.setattr(problem, "decoded", by_page)
    for kind in KINDS:
        with pytest.raises(AssertionError):
            properties.encoded_pages_hold_the_keys(Setting("cpu_tiled"), CASES["packed_cross_causal"], kind, 8)


def test_a_token_that_is_not_finite_reaches_who_sees_it() -> None:
    """Of two requests, the second has it; its first query does not see it."""
    inputs = make_inputs(Case("nan", packed=((3, 12), (3, 12)), mask=None), torch.float32)
    pool = paged(inputs, 4)
    assert isinstance(pool.layout.block_table, torch.Tensor)
    pool.k[pool.layout.block_table[1, 2].item(), 2] = torch.inf  # type: ignore[index]
    k, v = encode(pool.k, "int8"), encode(pool.v, "int8")
    with torch.no_grad():
        o = tw.attention(inputs.q, k, v, layout=pool.layout, mask=tw.causal)
    assert o[:4].isfinite().all()
    assert o[4:].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind: str) -> None:
    torch._dynamo.reset()
    inputs = make_inputs(Case("compiled", seqlen_q=3, seqlen_k=20), torch.float32)
    pool = paged(inputs, 8)
    k, v = encoded(pool.k, kind), encoded(pool.v, kind)

    def attend(q: torch.Tensor, k: Encoded, v: Encoded, table: torch.Tensor, seqlens: torch.Tensor) -> torch.Tensor:
        return tw.attention(q * 2.0, k, v, mask=tw.causal, layout=tw.Paged(table, seqlens))

    layout = (pool.layout.block_table, pool.layout.seqlens_k)
    with torch.no_grad():
        got = torch.compile(attend, fullgraph=True, backend="aot_eager")(inputs.q, k, v, *layout)
        assert torch.equal(got, attend(inputs.q, k, v, *layout))  # type: ignore[arg-type]


@pytest.mark.parametrize("flat", [False, True])
def test_opcheck(flat: bool) -> None:
    inputs = make_inputs(CASES["packed_cross_causal"], torch.float32)
    pool = paged(inputs, 4, flat=flat)
    arguments = inputs.arguments() | {"layout": pool.layout}
    k, v = (encode(x.nan_to_num(), "int8") for x in (pool.k, pool.v))
    with torch.no_grad():
        call = make_call(inputs.q.detach(), k, v, **arguments)
        operands = torch_op.operator_arguments(table.named("cpu_tiled"), call)
        torch.library.opcheck(torch.ops.tilewise.attention_forward.default, operands)


def test_kinds_and_strides_have_signatures_of_their_own() -> None:
    found = set()
    for kind in KINDS:
        k, v = (encode(torch.ones(4, 4, 2, 8), kind) for _ in range(2))
        apart = Encoded(k.data, k.scale.transpose(1, 2).contiguous().transpose(1, 2))
        for keys in (k, apart):
            calls = [make_call(Q, keys, v, layout=tw.Paged(TABLE, LENGTHS)) for _ in range(2)]
            assert calls[0].signature is calls[1].signature
            found.add(calls[0].signature)
    assert len(found) == 6


Q = torch.zeros(2, 1, 2, 8)
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
LENGTHS = torch.tensor([8, 5], dtype=torch.int32)


def _codes(*shape: int, kind: str = "int8", device: str = "cpu") -> Encoded:
    return encode(torch.ones(shape or (4, 4, 2, 8), device=device), kind)


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "keys alone": (
        lambda: {"v": torch.zeros(4, 4, 2, 8)},
        r"v: got Tensor; expected a tilewise.quant.Encoded, as k is",
    ),
    "values alone": (lambda: {"k": torch.zeros(4, 4, 2, 8)}, r"k: got Tensor; expected a tilewise.quant.Encoded, as v"),
    "no values": (lambda: {"v": None}, r"v: got NoneType"),
    "another layout": (
        lambda: {"layout": None},
        r"k: got an Encoded with layout Dense; expected layout=tilewise.Paged",
    ),
    "other codes": (lambda: {"v": _codes(kind="fp8")}, r"v: got codes 'fp8'; expected 'int8', as k has"),
    "three dimensions": (lambda: {"k": _codes(4, 2, 8)}, r"k: got an Encoded of shape \(4, 2, 8\)"),
    "values of other pages": (lambda: {"v": _codes(5, 4, 2, 8)}, r"v: got shape \(5, 4, 2, 8\)"),
    "another head_dim": (lambda: {"k": _codes(4, 4, 2, 16)}, r"k: got head_dim 16; expected 8"),
    "half the head_dim": (
        lambda: {"k": _codes(4, 4, 2, 4, kind="int4"), "v": _codes(4, 4, 2, 4, kind="int4")},
        r"k: got head_dim 4; expected 8",
    ),
    "heads that do not divide": (lambda: {"k": _codes(4, 4, 3, 8), "v": _codes(4, 4, 3, 8)}, r"k: got 3 heads"),
    "another device": (lambda: {"v": _codes(device="meta")}, r"v: got device meta; expected cpu"),
    "a list for q": (lambda: {"q": [1.0]}, r"q: got list"),
    "queries of no float": (lambda: {"q": Q.int()}, r"q: got torch.int32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    change, message = WRONG[name]
    arguments = {"q": Q, "k": _codes(), "v": _codes(), "layout": tw.Paged(TABLE, LENGTHS)} | change()
    for _ in range(2):  # not remembered as checked
        with pytest.raises(InputError, match=message):
            tw.attention(**arguments)


def test_what_does_not_read_codes_says_so() -> None:
    k, v, layout = _codes(), _codes(), tw.Paged(TABLE, LENGTHS)
    explained = tw.why(Q, k, v, layout=layout)
    assert explained.chosen == "cpu_tiled"
    for impl, q, what in (("hopper", Q, "torch.int8"), ("hopper_decode", Q.half(), "torch.float16")):
        unmet = [need.unmet(make_call(q, k, v, layout=layout)) for need in table.named(impl).needs]
        assert what in unmet
    q = Q.clone().requires_grad_()
    for impl, message in ((None, "no gradients with paged keys"), ("reference", "no gradients with encoded")):
        with pytest.raises(UnsupportedError, match=message):
            tw.attention(q, k, v, layout=layout, impl=impl)
    k.scale.requires_grad_()
    with pytest.raises(UnsupportedError, match="no gradients with encoded"):
        tw.attention(Q, k, v, layout=layout, impl="reference")


def test_nothing_to_read() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    for kind in KINDS:
        k, v = _codes(kind=kind), _codes(4, 4, 2, 6, kind=kind)
        o, lse = tw.attention_with_lse(torch.zeros(0, 3, 2, 8), k, v, layout=tw.Paged(none.view(0, 1), none))
        assert (o.shape, lse.shape) == ((0, 3, 2, 6), (0, 2, 3))
        o, lse = tw.attention_with_lse(Q, k, v, layout=tw.Paged(TABLE, torch.zeros_like(LENGTHS)))
        assert o.shape == (2, 1, 2, 6)
        assert not o.any()
        assert (lse == -torch.inf).all()
