"""Keys rotated on their way into pages on the CPU: any shapes, encoded or not, torch.compile, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core import dispatch
from tilewise.core.errors import InputError
from tilewise.kv import KVCache
from tilewise.ops.kv_write import cpu
from tilewise.ops.kv_write.problem import Write
from tilewise.quant import KINDS, Encoded
from tilewise.rotary import rotated
from tilewise.testing import writing
from tilewise.testing.properties import Setting
from tilewise.testing.writing import BITS, BY_NAME, ENCODED_ROPE_CASES, ROPE_CASES, RopeCase, WriteCase

SETTINGS = [Setting("cpu"), Setting("cpu", torch.bfloat16), Setting("reference", torch.float16)]


@pytest.mark.parametrize("rotary", ROPE_CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_rotates_where_told(setting: Setting, rotary: RopeCase) -> None:
    writing.rotates_where_told(setting, rotary)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotary", ENCODED_ROPE_CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_rotates_and_encodes_where_told(setting: Setting, rotary: RopeCase, kind: str) -> None:
    writing.rotates_where_told(setting, rotary, kind)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([None, *KINDS]),
    tokens=st.integers(0, 20),
    heads=st.integers(1, 5),
    pairs=st.tuples(st.integers(1, 20), st.integers(0, 8)),
    page_size=st.integers(1, 20),
    memory=st.sampled_from(["NHD", "HND", "joint"]),
    flags=st.tuples(*[st.booleans()] * 4),
    table=st.sampled_from([torch.float16, torch.float32, torch.float64]),
    dtype=st.sampled_from(list(BITS)),
)
def test_any_shape(
    kind: str | None, tokens: int, heads: int, pairs: tuple[int, int], page_size: int, memory: str,
    flags: tuple[bool, bool, bool, bool], table: torch.dtype, dtype: torch.dtype,
) -> None:  # fmt: skip
    sliced, skip, interleaved, joint = flags
    case = WriteCase("any", tokens, heads, 2 * sum(pairs), 4, page_size, 20, memory=memory, sliced=sliced, skip=skip)
    writing.rotates_where_told(
        Setting("cpu", dtype), RopeCase("any", case, 2 * pairs[0], interleaved, table, joint), kind
    )


def test_pairs_are_those_of_the_models() -> None:
    """Halves as Llama's `rotate_half` has them, neighbours as multiplication of complex numbers has them."""
    x, positions = torch.randn(7, 3, 16), torch.arange(7)
    angle = torch.outer(torch.arange(7.0), 10_000.0 ** (-torch.arange(8) / 8))
    cos, sin = (torch.cat((y, y), -1)[:, None] for y in (angle.cos(), angle.sin()))
    halves = x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin
    torch.testing.assert_close(rotated(x, tw.Rope(angle.cos(), angle.sin(), positions)), halves)
    z = torch.view_as_complex(x.view(7, 3, 8, 2)) * torch.polar(torch.ones_like(angle), angle)[:, None]
    neighbours = rotated(x, tw.Rope(angle.cos(), angle.sin(), positions, interleaved=True))
    torch.testing.assert_close(neighbours, torch.view_as_real(z).flatten(-2))


@pytest.mark.parametrize("kind", [None, "int8"])
def test_a_broken_twin_is_caught(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    write = cpu.write

    def turns_back(call: Write) -> None:
        assert call.rope is not None
        write(replace(call, rope=replace(call.rope, sin=-call.rope.sin)))

    monkeypatch.setattr(cpu, "write", turns_back)
    monkeypatch.setattr(dispatch, "_function", lambda module, name: getattr(cpu, name))
    with pytest.raises(AssertionError):
        writing.rotates_where_told(Setting("cpu"), ROPE_CASES[0], kind)


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("kind", [None, "fp8"])
def test_compiled(kind: str | None, made_inside: bool) -> None:
    """A rope that is an argument, or made in the graph, with a table of positions that is known when it runs."""
    torch._dynamo.reset()
    rotary, setting = ROPE_CASES[1], Setting("cpu")
    k, v, slots = writing.make_tokens(rotary.case, setting)
    given = writing.make_rope(rotary, slots)

    def step(k: torch.Tensor, rope: tw.Rope, *pages: torch.Tensor | Encoded) -> None:
        found = tw.Rope(rope.cos, rope.sin, rope.positions * 1, rope.interleaved) if made_inside else rope
        tw.kv_write(k * 2.0, v, *pages, slots, rope=found)

    found = []
    for run in (torch.compile(step, fullgraph=True, backend="aot_eager"), step):
        held = writing.encoded_memory(rotary.case, setting, kind) if kind else writing.make_memory(rotary.case, setting)
        run(k, given, held.k_pages, held.v_pages)
        found.append(held.bits)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    held = writing.encoded_memory(rotary.case, setting, kind) if kind else writing.make_memory(rotary.case, setting)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with pytest.raises(InputError, match="rope: got position 100001; expected 0 to 100000"):
        compiled(k, replace(given, positions=torch.full_like(given.positions, 100_001)), held.k_pages, held.v_pages)


@pytest.mark.parametrize("kind", [None, "int4"])
def test_opcheck(kind: str | None) -> None:
    rotary, setting = ROPE_CASES[0], Setting("cpu")
    k, v, slots = writing.make_tokens(rotary.case, setting)
    rope = writing.make_rope(rotary, slots)
    angles = [rope.cos, rope.sin, rope.positions]
    for operands in (angles, []):
        if kind is None:
            held = writing.make_memory(rotary.case, setting)
            arguments = (k, v, held.k_pages.nan_to_num(), held.v_pages.nan_to_num(), slots)
            operator = torch.ops.tilewise.kv_write.default
        else:
            held = writing.encoded_memory(rotary.case, setting, kind)
            codes = (held.k_pages.data, held.v_pages.data, held.k_pages.scale, held.v_pages.scale)
            arguments = (k, v, *(x.contiguous() for x in codes), slots)
            operator = torch.ops.tilewise.kv_write_encoded.default
        torch.library.opcheck(operator, (*arguments, operands, rope.interleaved, "cpu"))


@pytest.mark.parametrize("encoding", [None, "int8"])
def test_a_batch_knows_its_positions(encoding: str | None) -> None:
    """Tokens of several steps, of a fork and of a sequence that was cut, have the keys that they would have alone."""
    cache = KVCache(1, 20, 4, 2, 8, dtype=torch.float32, encoding=encoding)
    plain = KVCache(1, 20, 4, 2, 8, dtype=torch.float32, encoding=encoding)
    cos, sin = torch.randn(2, 40, 4)
    make = torch.Generator().manual_seed(0)
    held, other = [cache.new(), cache.new()], [plain.new(), plain.new()]
    for counts in ([9, 0], [1, 3], [2, 1]):
        batch, twin = cache.extend(held, counts), plain.extend(other, counts)
        want = [at for s, n in zip(held, counts, strict=True) for at in range(s.length - n, s.length)]
        assert batch.positions.tolist() == want
        assert batch.positions.dtype == torch.int32
        k, v = torch.randn(2, sum(counts), 2, 8, generator=make)
        rope = tw.Rope(cos, sin, batch.positions)
        batch.write(0, k, v, rope=rope)
        twin.write(0, rotated(k, rope), v)
        cache.truncate(held[0], held[0].length - 1)
        plain.truncate(other[0], other[0].length - 1)
    for a, b in zip(cache.pages(0), plain.pages(0), strict=True):
        parts = ((a.data, b.data), (a.scale, b.scale)) if isinstance(a, Encoded) else ((a, b),)
        assert all(torch.equal(x, y) for x, y in parts)


CASE, SETTING = BY_NAME["plain"], Setting("cpu")
TABLE, HERE = torch.ones(30, 8), torch.arange(9)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: (TABLE, TABLE, HERE), r"rope: got tuple; expected None or a tilewise.Rope"),
    (lambda: tw.Rope(TABLE, TABLE, HERE[:8]), r"rope: got 8 positions; expected 9, one for each token of k"),
    (lambda: tw.Rope(torch.ones(30, 9), torch.ones(30, 9), HERE), r"rope: got rotary_dim 18; expected at most 16"),
    (lambda: tw.Rope(*(x.to("meta") for x in (TABLE, TABLE, HERE))), r"rope: got on meta; expected cpu, as k"),
    (lambda: tw.Rope(TABLE, TABLE, HERE + 22), r"rope: got position 30; expected 0 to 29, the rows of cos and sin"),
    (lambda: tw.Rope(TABLE, TABLE, HERE - 1), r"rope: got position -1; expected 0 to 29"),
    (lambda: tw.Rope(TABLE.clone().requires_grad_(), TABLE, HERE), r"cos: got a tensor that takes a gradient"),
    (lambda: tw.Rope(3.0, TABLE, HERE), r"Rope cos: got float; expected a floating-point tensor"),
    (lambda: tw.Rope(TABLE[0], TABLE[0], HERE), r"Rope cos: got torch.float32 \(8,\)"),
    (lambda: tw.Rope(TABLE.int(), TABLE, HERE), r"Rope cos: got torch.int32 \(30, 8\)"),
    (lambda: tw.Rope(TABLE.mT, TABLE.mT, HERE), r"Rope cos: got torch.float32 \(8, 30\), strides \(1, 8\)"),
    (lambda: tw.Rope(TABLE[:, :0], TABLE[:, :0], HERE), r"Rope cos: got torch.float32 \(30, 0\)"),
    (lambda: tw.Rope(TABLE, TABLE[:9], HERE), r"Rope sin: got torch.float32 \(9, 8\).* expected .*\(30, 8\)"),
    (lambda: tw.Rope(TABLE, TABLE.half(), HERE), r"Rope sin: got torch.float16"),
    (lambda: tw.Rope(TABLE, TABLE, range(9)), r"Rope positions: got range"),
    (lambda: tw.Rope(TABLE, TABLE, HERE.float()), r"Rope positions: got torch.float32 \(9,\)"),
    (lambda: tw.Rope(TABLE, TABLE, HERE[None]), r"Rope positions: got torch.int64 \(1, 9\)"),
    (lambda: tw.Rope(TABLE, TABLE, HERE.repeat_interleave(2)[::2]), r"Rope positions: .* strides \(2,\)"),
    (lambda: tw.Rope(TABLE, TABLE, HERE.to("meta")), r"Rope positions: got torch.int64 \(9,\) on meta"),
    (lambda: tw.Rope(TABLE, TABLE, HERE, 1), r"Rope interleaved: got 1; expected True or False"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_rope_is_named_before_anything_is_written(make: Callable[[], Any], message: str) -> None:
    held = writing.make_memory(CASE, SETTING)
    before = held.bits
    k, v, slots = writing.make_tokens(CASE, SETTING)
    with pytest.raises(InputError, match=message):
        tw.kv_write(k, v, held.k_pages, held.v_pages, slots, rope=make())
    assert all(torch.equal(a, b) for a, b in zip(held.bits, before, strict=True))


def test_positions_of_skipped_tokens_may_be_anything_and_others_not() -> None:
    held = writing.make_memory(CASE, SETTING)
    k, v, slots = writing.make_tokens(CASE, SETTING)
    positions = torch.tensor([30, 1, -1, 3, 4, 5, 6, 7, 8])
    with pytest.raises(InputError, match="position 30"):
        tw.kv_write(k, v, held.k_pages, held.v_pages, slots, rope=tw.Rope(TABLE, TABLE, positions))
    slots[0] = -1
    with pytest.raises(InputError, match="position -1"):
        tw.kv_write(k, v, held.k_pages, held.v_pages, slots, rope=tw.Rope(TABLE, TABLE, positions))
    slots[2] = -1
    tw.kv_write(k, v, held.k_pages, held.v_pages, slots, rope=tw.Rope(TABLE, TABLE, positions))
