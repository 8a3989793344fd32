"""Cases of `qkv_prologue`, and how near to float64 its queries and pages must be: each number by a bound of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import tilewise as tw
from tilewise.ops.qkv_prologue import qkv_prologue
from tilewise.ops.qkv_prologue.problem import Call, make_call
from tilewise.quant import KINDS, ByChannel, Encoded, decode, encode
from tilewise.testing import writing
from tilewise.testing.properties import Setting
from tilewise.testing.writing import Memory, WriteCase

POSITIONS = 200  # rows of tables
EPS = 1e-5
CHANNELS = {"channels4": 4, "channels2": 2}  # bits of keys by channel; their values are int8


@dataclass(frozen=True)
class PrologueCase:
    """Tokens, heads and pages. `norms` is "own" for weights of the dtype of qkv, "float32", or "" for none; `pages` is
    "plain", a kind of codes or a name in `CHANNELS`; `memory` as in `WriteCase`. Between the heads of qkv lie `gap`
    numbers. Every third token of `skip` has no slot.
    """

    name: str
    tokens: int = 9
    heads_kv: int = 2
    group: int = 3
    head_dim: int = 16
    rotary_dim: int = 16
    interleaved: bool = False
    norms: str = "own"
    pages: str = "plain"
    memory: str = "NHD"
    page_size: int = 4
    num_pages: int = 7
    gap: int = 0
    skip: bool = True
    index: torch.dtype = torch.int64
    table: torch.dtype = torch.float32
    seed: int = 0

    def __repr__(self) -> str:
        return self.name

    @property
    def heads(self) -> tuple[int, int]:
        """Of q, and of k as of v."""
        return self.group * self.heads_kv, self.heads_kv

    @property
    def write(self) -> WriteCase:
        """The pages alone."""
        shape = (self.tokens, self.heads_kv, self.head_dim, self.head_dim, self.page_size, self.num_pages)
        return WriteCase(self.name, *shape, self.memory, skip=self.skip, index=self.index, seed=self.seed)


CASES = [
    PrologueCase("plain", norms=""),
    PrologueCase("norms", skip=False),
    PrologueCase("float32_norms", norms="float32", memory="HND", gap=8, index=torch.int32),
    PrologueCase("part", head_dim=24, rotary_dim=12, memory="joint", group=4, table=torch.bfloat16),
    PrologueCase("neighbours", interleaved=True, group=1, gap=3),
    PrologueCase("neighbours_of_some", head_dim=48, rotary_dim=20, interleaved=True, norms="float32", memory="joint"),
    PrologueCase("plain_part", head_dim=48, rotary_dim=32, norms="", memory="HND", gap=8),
    PrologueCase("odd", heads_kv=3, group=1, head_dim=5, rotary_dim=4, page_size=5, gap=2),
    PrologueCase("odd_neighbours", heads_kv=1, head_dim=7, rotary_dim=6, interleaved=True, page_size=1, num_pages=11),
    PrologueCase("three", head_dim=6, rotary_dim=6, group=1, table=torch.float16),
    PrologueCase("qwen3", tokens=3, heads_kv=1, group=4, head_dim=128, rotary_dim=128, page_size=16, num_pages=2),
    PrologueCase("decode", tokens=1, heads_kv=4, group=4, head_dim=64, rotary_dim=64, norms="", skip=False),
    PrologueCase("no_token", tokens=0),
    PrologueCase("int8", pages="int8", group=4, norms="float32", index=torch.int32),
    PrologueCase("int8_plain", pages="int8", norms="", memory="joint", gap=8),
    PrologueCase("fp8", pages="fp8", head_dim=48, rotary_dim=48, memory="HND"),
    PrologueCase("fp8_neighbours", pages="fp8", head_dim=24, rotary_dim=20, interleaved=True, memory="joint", group=1),
    PrologueCase("int4", pages="int4", head_dim=48, rotary_dim=32, gap=8),
    PrologueCase("int4_plain", pages="int4", head_dim=64, rotary_dim=64, norms="", memory="HND"),
    PrologueCase("int4_neighbours", pages="int4", interleaved=True, norms="float32", memory="joint"),
    PrologueCase("int4_odd", pages="int4", head_dim=10, rotary_dim=10, group=1),
    PrologueCase("int4_odd_neighbours", pages="int4", head_dim=10, rotary_dim=8, interleaved=True, heads_kv=1),
    PrologueCase("channels4", pages="channels4"),
    PrologueCase("channels2", pages="channels2", head_dim=48, rotary_dim=20, interleaved=True, norms="", memory="HND"),
    PrologueCase("channels4_joint", pages="channels4", memory="joint", norms="float32", gap=8, index=torch.int32),
]
TRITON_CASES = [case for case in CASES if case.pages not in CHANNELS]
BY_NAME = {case.name: case for case in CASES}


class Inputs(NamedTuple):
    """The arguments of a call, but for the pages."""

    qkv: torch.Tensor
    slots: torch.Tensor
    rope: tw.Rope
    norms: tuple[torch.Tensor, torch.Tensor] | None


def make_memory(case: PrologueCase, setting: Setting) -> Memory:
    """Pages that hold some numbers."""
    if case.pages in CHANNELS:
        return writing.memory_by_channel(case.write, setting, CHANNELS[case.pages])
    if case.pages in KINDS:
        return writing.encoded_memory(case.write, setting, case.pages)
    return writing.make_memory(case.write, setting)


def make_inputs(case: PrologueCase, setting: Setting, held: Memory) -> Inputs:
    """Heads of all sizes, a head of 0 among them; the first and the last position."""
    make = torch.Generator().manual_seed(case.seed + 10)
    if isinstance(held.k_pages, ByChannel):
        slots = writing.slots_of_pages(case.write, held.k_pages.place, setting.device)
    else:
        slots = writing.make_tokens(case.write, setting)[2]
    heads, heads_kv = case.heads
    shape = (len(slots), heads + 2 * heads_kv)
    qkv = torch.randn(*shape, case.head_dim + case.gap, generator=make) * torch.randn(*shape, 1, generator=make).exp()
    qkv[2:3, heads] = 0.0
    qkv[..., case.head_dim :] = torch.nan
    qkv = qkv.to(setting.device, setting.dtype)[..., : case.head_dim]
    positions = torch.randint(0, POSITIONS, slots.shape, generator=make)
    positions[1::4], positions[2::4] = 0, POSITIONS - 1
    cos, sin = (x.to(setting.device, case.table) for x in tw.rope_tables(case.rotary_dim, POSITIONS))
    rope = tw.Rope(cos, sin, positions.to(setting.device, case.index), case.interleaved)
    if not case.norms:
        return Inputs(qkv, slots, rope, None)
    dtype = torch.float32 if case.norms == "float32" else setting.dtype
    q_norm, k_norm = (1.0 + torch.randn(2, case.head_dim, generator=make) / 4).to(setting.device, dtype)
    return Inputs(qkv, slots, rope, (q_norm, k_norm))


def named(norms: tuple[torch.Tensor, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Weights as keyword arguments."""
    return {} if norms is None else {"q_norm": norms[0], "k_norm": norms[1]}


def ours(given: Inputs, held: Memory, impl: str | None) -> torch.Tensor:
    """What is tested."""
    arguments = named(given.norms)
    return qkv_prologue(
        given.qkv, held.k_pages, held.v_pages, given.slots, rope=given.rope, eps=EPS, impl=impl, **arguments
    )


# bounds --------------------------------------------------------------------------------------------------------------


class Exact(NamedTuple):
    """Heads in float64, and how far off each number may be before it is rounded."""

    value: torch.Tensor
    error: torch.Tensor


def exact(x: torch.Tensor, weight: torch.Tensor | None, rope: tw.Rope, *, apart: bool = False) -> Exact:
    """Heads x (tokens, heads, head_dim), normalised and rotated as complex numbers are multiplied. A sum of squares is
    off by a unit for each term, its root by half of that, and an operation on the way by a unit; `apart` rounds what is
    normalised to the dtype of x.
    """
    unit, half = torch.finfo(torch.float32).eps / 2, torch.finfo(x.dtype).eps / 2
    tiny = torch.finfo(x.dtype).tiny
    units, wide = 3.0, x.double()
    if weight is not None:
        wide = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        units += x.shape[-1] / 2 + 8.0
    first = torch.arange(rope.rotary_dim // 2, device=x.device) * (2 if rope.interleaved else 1)
    second = first + (1 if rope.interleaved else rope.rotary_dim // 2)
    cos, sin = (table[rope.positions].double()[:, None] for table in (rope.cos, rope.sin))
    a, b = wide[..., first], wide[..., second]
    value, terms = wide.clone(), wide.abs()
    product = torch.complex(a, b) * torch.complex(cos.expand_as(a).clone(), sin.expand_as(a).clone())
    value[..., first], value[..., second] = product.real, product.imag
    terms[..., first] = (a * cos).abs() + (b * sin).abs()
    terms[..., second] = (b * cos).abs() + (a * sin).abs()
    error = units * unit * terms
    if apart and weight is not None:
        error += half * (terms * (1.0 + units * unit) + 4 * tiny)
    return Exact(value, error)


def rounded(found: Exact, dtype: torch.dtype) -> torch.Tensor:
    """How far off numbers may be that are rounded to a dtype once."""
    info = torch.finfo(dtype)
    return found.error + info.eps / 2 * (found.value.abs() + found.error + 2 * info.tiny)


def _near(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor, what: str) -> None:
    off = (got.double() - want).abs()
    worst = float((off - allowed).max()) if off.numel() else 0.0
    assert bool((off <= allowed).all()), f"{what}: off by {worst:.3g} more than allowed"


def encoded_error(found: Exact, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """How far off codes may be, each a nearest one: half a step of the scale, of fp8 half a step of their exponent."""
    scale = scale.double()[..., None]
    step = torch.maximum(found.value.abs() / 16, scale * 2.0**-10) if kind == "fp8" else scale / 2
    return 2 * found.error + step * (1.0 + 2.0**-20) + torch.finfo(torch.float32).eps * found.value.abs()


# checks --------------------------------------------------------------------------------------------------------------


def check(case: PrologueCase, setting: Setting) -> None:
    """Queries and keys are as near to float64 as one rounding lets them be (of `apart` two), values are those that came
    or their codes, and nothing else in the pages has changed.
    """
    held, wanted = make_memory(case, setting), make_memory(case, setting)
    given = make_inputs(case, setting, held)
    q = ours(given, held, setting.impl)
    check_results(case, setting, given, held, wanted, q)


def check_results(
    case: PrologueCase, setting: Setting, given: Inputs, held: Memory, wanted: Memory, q: torch.Tensor
) -> None:
    """As `check`, of a call that was made: `wanted` are the pages before it, and are changed."""
    heads, heads_kv = case.heads
    x, k, v = torch.split(given.qkv, [heads, heads_kv, heads_kv], 1)
    weights = given.norms or (None, None)
    of_q, of_k = (exact(y, w, given.rope, apart=setting.impl == "apart") for y, w in zip((x, k), weights, strict=True))
    assert q.shape == x.shape
    assert q.dtype == given.qkv.dtype
    assert q.stride(-1) == 1
    _near(q, of_q.value, rounded(of_q, q.dtype), "q")
    used = given.slots >= 0
    slots, of_k = given.slots[used].long(), Exact(of_k.value[used], of_k.error[used])
    at = (slots // case.page_size, slots % case.page_size)
    if isinstance(held.k_pages, ByChannel):
        _check_channels(held.k_pages, wanted.k_pages, at, of_k)
    else:
        _check_keys(held.k_pages, wanted.k_pages, at, of_k)
    _expect_values(wanted.v_pages, at, v[used])
    same = zip(held.bits, wanted.bits, strict=True)
    assert all(torch.equal(x, y) for x, y in same), "values are others, or what no token was written to"


def agrees_with_apart(case: PrologueCase, setting: Setting) -> None:
    """Without norms the bits are those of `apart`; with norms, which it rounds, queries and keys that are not encoded
    are as near to its own as both are to float64.
    """
    held, other = make_memory(case, setting), make_memory(case, setting)
    given = make_inputs(case, setting, held)
    q, of_apart = ours(given, held, setting.impl), ours(given, other, "apart")
    if given.norms is None:
        assert torch.equal(q, of_apart), "q: other bits"
        assert all(torch.equal(x, y) for x, y in zip(held.bits, other.bits, strict=True)), "pages: other bits"
        return
    heads, heads_kv = case.heads
    x, k, _ = torch.split(given.qkv, [heads, heads_kv, heads_kv], 1)
    slots = given.slots.clamp(min=0).long()
    at = (slots // case.page_size, slots % case.page_size)
    both = [("q", q, of_apart, x, given.norms[0], slots >= 0)]
    if isinstance(held.k_pages, torch.Tensor) and held.k_pages.numel():
        both.append(("k_pages", held.k_pages[at], other.k_pages[at], k, given.norms[1], given.slots >= 0))
    for what, got, want, y, weight, rows in both:
        once, twice = (rounded(exact(y, weight, given.rope, apart=apart), q.dtype) for apart in (False, True))
        allowed = once + twice
        _near(got[rows], want[rows].double(), allowed[rows], f"{what} of apart")


At = tuple[torch.Tensor, torch.Tensor]


def _check_keys(pages: Any, wanted: Any, at: At, keys: Exact) -> None:
    """Written keys are near; what is right is then put into `wanted`."""
    if isinstance(pages, torch.Tensor):
        _near(pages[at], keys.value, rounded(keys, pages.dtype), "k_pages")
        wanted[at] = pages[at]
        return
    data, scale = pages.data[at], pages.scale[at]
    largest, worst = keys.value.abs().amax(-1), keys.error.amax(-1)
    allowed = worst + torch.finfo(torch.float32).eps * largest
    _near(scale * KINDS[pages.kind].largest, largest, 2 * allowed, "scales of k_pages")
    _near(decode(Encoded(data, scale)), keys.value, encoded_error(keys, scale, pages.kind), "codes of k_pages")
    wanted.data[at], wanted.scale[at] = data, scale


def _check_channels(pages: ByChannel, wanted: ByChannel, at: At, keys: Exact) -> None:
    """As `_check_keys`, of keys in open pages, and of pages of codes, all of their keys."""
    dtype, page_size = pages.open.dtype, pages.data.shape[1]
    place = pages.place[at[0]]
    is_open = place >= 0
    rows, allowed = (place[is_open], at[1][is_open]), rounded(keys, dtype)
    _near(pages.open[rows], keys.value[is_open], allowed[is_open], "open pages")
    wanted.open[rows] = pages.open[rows]
    most, half = 2**pages.bits - 1, torch.finfo(dtype).eps / 2
    for page in sorted(set(at[0][~is_open].tolist())):
        new = at[0] == page
        value = pages.open[-1 - int(pages.place[page])].double().clone()
        off = torch.zeros_like(value)
        value[at[1][new]], off[at[1][new]] = keys.value[new], allowed[new]
        assert int(at[1][new].max()) == page_size - 1
        step, least = (x[page].double()[None].abs() for x in (pages.scale, pages.least))
        # a step, and the least number, are rounded to the dtype of keys; codes end where they do
        off = off + 2 * off.amax(0) + step / 2 + half * (2 * most * step + 2 * least)
        got = pages.keys(torch.tensor([page], device=pages.device))[0]
        _near(got, value, off + 2.0**-22 * (least + most * step), f"page {page} of codes")
        for part in ("data", "scale", "least"):
            getattr(wanted, part)[page] = getattr(pages, part)[page]


def _expect_values(wanted: Any, at: At, v: torch.Tensor) -> None:
    if isinstance(wanted, torch.Tensor):
        wanted[at] = v
    elif len(v):
        made = encode(v, wanted.kind)
        wanted.data[at], wanted.scale[at] = made.data, made.scale


# what is compiled without a GPU --------------------------------------------------------------------------------------


def _variant(norms: str, pages: str = "plain", interleaved: bool = False) -> Callable[[int, torch.dtype], Call]:
    """Of a head_dim and a dtype."""

    def make(dim: int, dtype: torch.dtype) -> Call:
        case = PrologueCase("", 64, 2, 4, dim, dim, interleaved, norms, pages, page_size=16, num_pages=64, skip=False)
        setting = Setting("triton", dtype)
        held = make_memory(case, setting)
        given = make_inputs(case, setting, held)
        return make_call(
            (given.qkv, held.k_pages, held.v_pages, *(given.norms or (None, None))), given.slots, given.rope, EPS
        )

    return make


VARIANTS = {
    "plain": _variant(""),
    "norms": _variant("own"),
    "norms neighbours": _variant("own", interleaved=True),
    "int8 norms": _variant("float32", "int8"),
    "fp8": _variant("", "fp8"),
    "int4 norms": _variant("own", "int4"),
    "int4 norms neighbours": _variant("own", "int4", interleaved=True),
}
