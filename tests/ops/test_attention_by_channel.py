"""Keys by channel on the CPU: what their pages stand for is what is attended to, and errors name what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.ops.attention import table, torch_op
from tilewise.ops.attention.problem import make_call
from tilewise.quant import ByChannel, Encoded, decode, encode, encode_by_channel
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import by_channel, encoded, paged
from tilewise.testing.properties import Setting

NAMES = ("alibi_causal", "packed_cross_causal", "packed_window_sink", "mqa", "softcap_causal")
SETTINGS = [Setting("cpu_tiled"), Setting("cpu_tiled", torch.bfloat16), Setting("reference", torch.float16)]


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_pages_hold_the_keys(setting: Setting, name: str, bits: int) -> None:
    case = CASES[name]
    page_size = 5 if name == "packed_window_sink" else 16
    properties.encoded_pages_hold_the_keys(setting, case, "int8", page_size, flat=page_size == 5, bits=bits)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), min_size=1, max_size=4),
    bits=st.sampled_from([4, 2]),
    kind=st.sampled_from(["int8", "fp8", "int4"]),
    page_size=st.integers(1, 20),
    flat=st.booleans(),
    group=st.integers(1, 3),
)
def test_any_lengths(
    lengths: list[tuple[int, int]], bits: int, kind: str, page_size: int, flat: bool, group: int
) -> None:
    case = Case("any", packed=tuple(lengths), heads_q=2 * group, head_dim=12, head_dim_v=6, mask=None)
    properties.encoded_pages_hold_the_keys(Setting("cpu_tiled"), case, kind, page_size, flat, bits=bits)


@pytest.mark.parametrize("twin", ["open pages are codes", "codes without their least number"])
def test_broken_twins_are_caught(twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ByChannel.keys

    def broken(self: ByChannel, pages: torch.Tensor) -> torch.Tensor:
        if twin.startswith("open"):
            return keys(replace(self, place=self.place.clamp(max=-1)), pages)
        return keys(replace(self, least=torch.zeros_like(self.least)), pages)

    monkeypatch.setattr(ByChannel, "keys", broken)
    with pytest.raises(AssertionError):
        properties.encoded_pages_hold_the_keys(Setting("cpu_tiled"), CASES["packed_cross_causal"], "int8", 8, bits=4)


def _pool(bits: int = 4) -> tuple[torch.Tensor, ByChannel, Encoded, dict[str, Any]]:
    inputs = make_inputs(CASES["packed_cross_causal"], torch.float32)
    pool = paged(inputs, 4)
    arguments = inputs.arguments() | {"layout": pool.layout}
    return inputs.q.detach(), by_channel(pool.k, bits), encoded(pool.v, "int8"), arguments


@pytest.mark.parametrize("bits", [4, 2])
def test_a_plan_runs_them(bits: int) -> None:
    q, k, v, arguments = _pool(bits)
    with torch.no_grad():
        arguments = {name: arguments[name] for name in ("layout", "mask")}
        want = tw.attention(q, k, v, **arguments)
        plan = tw.plan(q, k, v, **arguments)
        assert torch.equal(plan.run(q, k, v), want)
        for keys, message in (
            (v, "k: got Encoded; expected a ByChannel, as planned"),
            (k.open, "k: got Tensor; expected a ByChannel"),
            (replace(k, open=k.open[:-1]), r"k.open: got torch.float32 \(\d+, 4, 2, 16\).*expected"),
        ):
            with pytest.raises(InputError, match=message):
                plan.run(q, keys, v)
        with pytest.raises(InputError, match="k: got ByChannel; expected an Encoded, as planned"):
            tw.plan(q, v, v, **arguments).run(q, k, v)


def test_compiled() -> None:
    torch._dynamo.reset()
    q, k, v, arguments = _pool()
    layout = arguments["layout"]

    def attend(q: torch.Tensor, k: ByChannel, v: Encoded, table: Any, seqlens: Any, cu: Any) -> torch.Tensor:
        return tw.attention(q * 2.0, k, v, mask=tw.causal, layout=tw.Paged(table, seqlens, cu))

    parts = (layout.block_table, layout.seqlens_k, layout.cu_seqlens_q)
    with torch.no_grad():
        got = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v, *parts)
        assert torch.equal(got, attend(q, k, v, *parts))


def test_opcheck() -> None:
    q, k, v, arguments = _pool()
    with torch.no_grad():
        operands = torch_op.operator_arguments(table.named("cpu_tiled"), make_call(q, k, v, **arguments))
        torch.library.opcheck(torch.ops.tilewise.attention_forward.default, operands)


def test_a_page_that_is_cut_reads_as_its_codes() -> None:
    """Whoever has fewer tokens of a full page than it holds."""
    x = torch.randn(3, 4, 2, 8)
    k, v = encode_by_channel(x, 4), encode(x, "int8")
    layout = tw.Paged(torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32))
    q = torch.randn(1, 2, 2, 8)
    rows = [y[[2, 0]].flatten(0, 1)[None, :6] for y in (k.keys(torch.arange(3)), decode(v))]
    got, want = tw.attention(q, k, v, layout=layout, mask=tw.causal), tw.attention(q, *rows, mask=tw.causal)
    torch.testing.assert_close(got, want)


def test_bits_and_strides_have_signatures_of_their_own() -> None:
    found = set()
    v = encode(torch.ones(4, 4, 2, 8), "int8")
    fours = encode_by_channel(torch.ones(4, 4, 2, 8), 4)
    apart = replace(fours, scale=fours.scale.transpose(0, 1).contiguous().transpose(0, 1))
    opened = replace(fours, open=torch.ones(1, 4, 2, 8))
    for keys in (
        encode(torch.ones(4, 4, 2, 8), "int8"),
        encode_by_channel(torch.ones(4, 4, 2, 8), 2),
        fours,
        apart,
        opened,
    ):
        calls = [make_call(Q, keys, v, layout=tw.Paged(TABLE, LENGTHS)) for _ in range(2)]
        assert calls[0].signature is calls[1].signature
        found.add(calls[0].signature)
    assert len(found) == 5


Q = torch.zeros(2, 1, 2, 8)
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
LENGTHS = torch.tensor([8, 5], dtype=torch.int32)


def _keys(*shape: int, device: str = "cpu") -> ByChannel:
    return encode_by_channel(torch.ones(shape or (4, 4, 2, 8), device=device), 4)


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "values as they are": (lambda: {"v": torch.zeros(4, 4, 2, 8)}, r"v: got Tensor; expected a tilewise.quant.Encoded"),
    "values by channel": (lambda: {"v": _keys()}, r"v: got ByChannel; expected a tilewise.quant.Encoded"),
    "another layout": (
        lambda: {"layout": None},
        r"k: got a ByChannel with layout Dense; expected layout=tilewise.Paged",
    ),
    "values of other pages": (lambda: {"k": _keys(5, 4, 2, 8)}, r"v: got shape \(4, 4, 2, 8\)"),
    "another head_dim": (lambda: {"k": _keys(4, 4, 2, 16)}, r"k: got head_dim 16; expected 8"),
    "another device": (lambda: {"k": _keys(device="meta")}, r"k: got device meta; expected cpu"),
    "no such row": (lambda: {"k": replace(_keys(), place=TABLE[0].repeat(2))}, r"k.place: got row 1; expected below 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    change, message = WRONG[name]
    values = encode(torch.ones(4, 4, 2, 8), "int8")
    arguments = {"q": Q, "k": _keys(), "v": values, "layout": tw.Paged(TABLE, LENGTHS)} | change()
    for _ in range(2):  # not remembered as checked
        with pytest.raises(InputError, match=message):
            tw.attention(**arguments)


def test_what_does_not_read_them_says_so() -> None:
    k, v, layout = _keys(), encode(torch.ones(4, 4, 2, 8), "fp8"), tw.Paged(TABLE, LENGTHS)
    assert tw.why(Q, k, v, layout=layout).chosen == "cpu_tiled"
    for impl, what in (("hopper", "torch.uint8"), ("hopper_decode", "by channel")):
        unmet = [need.unmet(make_call(Q, k, v, layout=layout)) for need in table.named(impl).needs]
        assert what in unmet
    q = Q.clone().requires_grad_()
    for impl, message in ((None, "no gradients with paged keys"), ("reference", "no gradients with encoded")):
        with pytest.raises(UnsupportedError, match=message):
            tw.attention(q, k, v, layout=layout, impl=impl)
    k.least.requires_grad_()
    with pytest.raises(UnsupportedError, match="no gradients with encoded"):
        tw.attention(Q, k, v, layout=layout, impl="reference")


def test_nothing_to_read() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    v = encode(torch.ones(4, 4, 2, 6), "int4")
    o, lse = tw.attention_with_lse(torch.zeros(0, 3, 2, 8), _keys(), v, layout=tw.Paged(none.view(0, 1), none))
    assert (o.shape, lse.shape) == ((0, 3, 2, 6), (0, 2, 3))
    o, lse = tw.attention_with_lse(Q, _keys(), v, layout=tw.Paged(TABLE, torch.zeros_like(LENGTHS)))
    assert not o.any()
    assert (lse == -torch.inf).all()
