"""Cases of `quantize_qkv`, and what must hold of them on any device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.operation import Operation
from tilewise.ops.quantize.problem import has_sums, make_call
from tilewise.ops.quantize.table import QUANTIZE
from tilewise.quant import Quantized
from tilewise.quant.schemes import Scheme

EPS = 2.0**-23  # of float32


@dataclass(frozen=True)
class QuantizeCase:
    """Queries and keys of some lengths, packed where `packed`; `shift` moves keys and values away from 0. `memory` is
    "" for contiguous rows, "joint" for parts of one projection, "HND" for heads before tokens. `turns` are how many
    dimensions of queries and keys are turned first, and whether neighbours.
    """

    name: str
    scheme: Scheme
    lengths: tuple[tuple[int, int], ...] = ((70, 150), (70, 150))
    heads: tuple[int, int] = (4, 2)
    dim: int = 16
    dim_v: int = 24
    shift: float = 3.0
    packed: bool = False
    memory: str = ""
    turns: tuple[int, bool] = (0, False)

    def __repr__(self) -> str:
        return self.name


RAGGED = ((5, 0), (0, 3), (129, 257), (64, 128), (1, 1))
_SCHEMES: dict[str, Scheme] = {
    "sage1": tw.Sage1(),
    "sage2": tw.Sage2(),
    "sage2_int4": tw.Sage2("int4"),
    "sage2pp": tw.Sage2pp(),
    "fa3": tw.FA3FP8(),
    "blocks": tw.FP8("block", "block", "block"),
    "tokens": tw.FP8("token", "token", "channel"),
    "all_centred": tw.Sage("fp8", "fp8", "warp", "token", ("q", "k", "v")),
    "values_as_numbers": tw.Sage(pv="fp16", q_scale="token", k_scale="block", smooth=("q", "v")),
    "nothing_centred": tw.Sage("int4", smooth=()),
    "value_blocks": tw.Sage(v_scale="block"),
    "centred_value_blocks": tw.Sage(smooth=("k", "v"), v_scale="block"),
    "rotated": tw.Sage(smooth=("q", "k"), rotate="hadamard"),
    "rotated_head": tw.FP8(rotate="hadamard"),
}
CASES = [
    *(QuantizeCase(name, scheme) for name, scheme in _SCHEMES.items()),
    *(QuantizeCase(f"{name}_packed", scheme, RAGGED, packed=True, memory="joint") for name, scheme in _SCHEMES.items()),
    QuantizeCase("one_row", tw.Sage2("int4"), ((1, 1),), (1, 1), 1, 1),
    QuantizeCase("odd", tw.Sage2(), ((65, 129),), (3, 1), 7, 33, memory="HND"),
    QuantizeCase("odd_head", tw.FP8(), ((63, 127),), (3, 3), 100, 9, memory="joint"),
    QuantizeCase("widest", tw.Sage2("int4"), ((3, 5),), (2, 1), 256, 256),
    QuantizeCase("long", tw.Sage(smooth=("k", "v")), ((1, 1300),), (1, 1), 8, 8),
    QuantizeCase("turned", tw.Sage2(), dim=32, turns=(32, False)),
    QuantizeCase("turned_packed", tw.Sage2(), RAGGED, packed=True, memory="joint", turns=(16, False)),
    QuantizeCase("turned_centred", tw.Sage2("int4"), turns=(16, True)),
    QuantizeCase("turned_rotated", tw.Sage(rotate="hadamard"), ((65, 129),), turns=(8, True), memory="HND"),
    QuantizeCase("turned_heads", tw.FP8(), dim=23, turns=(10, False)),
    QuantizeCase("turned_neighbours", tw.FP8(), RAGGED, packed=True, dim=7, turns=(6, True)),
    QuantizeCase("no_queries", tw.Sage2("int4"), ((0, 5),)),
    QuantizeCase("no_keys", tw.Sage2("int4"), ((5, 0),)),
    QuantizeCase("no_sequence", tw.Sage2(), ()),
]
BY_NAME = {case.name: case for case in CASES}


def make_inputs(case: QuantizeCase, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """q, k, v, layout, and where rows are turned rope."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {"layout": tw.Dense()}
    sizes = {"q": (0, case.heads[0], case.dim), "k": (1, case.heads[1], case.dim), "v": (1, case.heads[1], case.dim_v)}
    for name, (side, heads, dim) in sizes.items():
        lengths = [both[side] for both in case.lengths]
        lead = (sum(lengths),) if case.packed else (len(lengths), lengths[0] if lengths else 0)
        x = torch.randn(*lead, heads, dim, generator=generator)
        x = x + case.shift * torch.randn(dim, generator=generator) if name != "q" else x + 1.0
        made[name] = laid(case, x.to(device, dtype))
    if case.packed:
        cu = [torch.tensor([0, *itertools.accumulate(both[n] for both in case.lengths)]) for n in (0, 1)]
        made["layout"] = tw.Packed(*(x.to(device, torch.int32) for x in cu))
    if case.turns[0]:
        made["rope"] = tuple(_rope(case.turns, made[side].shape[:-2].numel(), device, generator) for side in "qk")
    return made


def _rope(turns: tuple[int, bool], tokens: int, device: str, generator: torch.Generator) -> tw.Rope:
    """Tokens that stand anywhere."""
    angle = torch.rand(40, turns[0] // 2, generator=generator) * 6.28
    positions = torch.randint(0, 40, (tokens,), generator=generator)
    return tw.Rope(angle.cos().to(device), angle.sin().to(device), positions.to(device), turns[1])


def laid(case: QuantizeCase, x: torch.Tensor) -> torch.Tensor:
    """A copy of x (..., rows, heads, dim) that lies as the case says; what lies between rows is NaN."""
    if case.memory == "joint":
        return torch.cat((x, torch.full_like(x[..., :1, :], torch.nan)), -2)[..., :-1, :]
    return x.transpose(-2, -3).contiguous().transpose(-2, -3) if case.memory == "HND" else x


def tensors(x: Quantized) -> dict[str, torch.Tensor]:
    """What it holds, on a CPU."""
    found = {name: part.cpu() for name, part in vars(x).items() if isinstance(part, torch.Tensor)}
    for side, sums in (("q", x.q_sums), ("k", x.k_sums)):
        found |= dict(zip((f"{side}_sum", f"{side}_unit_sum"), (one.cpu() for one in sums or ()), strict=False))
    return found


def check(case: QuantizeCase, dtype: torch.dtype, impl: str, device: str = "cpu", like: str = "cpu") -> None:
    """`impl` gives what implementation `like` gives, bit for bit where arithmetic allows."""
    given = make_inputs(case, dtype, device)
    there = given if like != "cpu" else make_inputs(case, dtype)
    sums = has_sums(case.scheme)
    got = tw.quantize_qkv(**given, scheme=case.scheme, sums=sums, impl=impl)
    want = tw.quantize_qkv(**there, scheme=case.scheme, sums=sums, impl=like)
    assert (want.q_sums is not None) is (want.k_sums is not None) is sums
    alike(tensors(got), tensors(want), rotated=case.scheme.rotate != "none")


def alike(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rotated: bool) -> None:
    """The same bits; but biases and sums of blocks, and with a rotation scales, are sums in any order, and a code may
    be the next one.
    """
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape), name
        assert torch.equal(got[name].isnan(), x.isnan()), f"{name}: NaN elsewhere"
        found, x = (y.float().nan_to_num() for y in (got[name], x))
        if name == "q_bias":
            assert not x.numel() or float((found - x).abs().max()) <= _of_biases(want)
        elif name.endswith("_sum"):
            assert not x.numel() or float((found - x).abs().max()) <= _of_sums(want, name), f"{name}: other sums"
        elif rotated and name in ("q_scale", "k_scale"):
            torch.testing.assert_close(found, x, rtol=256 * EPS, atol=0.0, msg=name)
        elif rotated and name in ("q", "k"):
            step = 1.0 if got[name].dtype == torch.int8 else (x.abs() / 8).clamp(min=2.0**-9)
            assert bool(((found - x).abs() <= step).all()), f"{name}: more than one code apart"
            assert float((found != x).sum()) <= 1 + 1e-3 * x.numel(), f"{name}: too many other codes"
        else:
            assert torch.equal(found, x), f"{name}: other bits"


def _of_biases(x: dict[str, torch.Tensor]) -> float:
    """How far two float32 sums of products of queries and means of keys may be from each other, in any order."""
    dim = x["q"].shape[-1]
    largest = float(x["q"].float().abs().max() * x["q_scale"].nan_to_num().max())
    means = float(x["k_mean"].nan_to_num().abs().sum(-1).max())
    return float(dim * EPS * largest * dim**0.5 * means)  # a number may be larger before it is rotated


def _of_sums(x: dict[str, torch.Tensor], name: str) -> float:
    """How far two float32 sums of a block's rows may be from each other, in any order: of at most 128 terms, and of
    rows of length 1 also by what the sums of their squares are, and by 16 bits of what makes them so.
    """
    if "unit" in name:
        return 128 * (EPS * (128 + x[name].shape[-1]) + 2.0**-17)
    side = name[0]
    if not x[side].numel():
        return 0.0
    largest = float(x[side].float().abs().max() * x[f"{side}_scale"].nan_to_num().max())
    means = float(x[f"{side}_mean"].float().nan_to_num().abs().max()) if f"{side}_mean" in x else 0.0
    return 128 * EPS * 128 * (largest + means)


def check_meaning(case: QuantizeCase, dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    """Scores and values that `Quantized` stands for are those of what was given, but for the rounding of codes: half a
    step of a group's scale, or of float8's 3 bits.
    """
    given = make_inputs(case, dtype, device)
    x = tw.quantize_qkv(**given, scheme=case.scheme, impl=impl)
    for side, rope in zip("qk", given.get("rope", ()), strict=False):
        given[side] = tw.rope(given[side], rope=rope)
    q, k, v = x.numbers()
    assert_near(v, given["v"].double(), _of_values(x))
    if case.packed or not q.numel() or not k.numel():
        return
    group = case.heads[0] // case.heads[1]
    s, found = (
        torch.einsum("bihd,bjhd->bhij", a, b.repeat_interleave(group, 2))
        for a, b in ((given["q"].double(), given["k"].double()), (q, k))
    )
    # |q k - q^ k^| <= |q - q^| |k| + |q^| |k - k^|, each row's distance at most that of all its numbers
    width = x.q.shape[-1]
    q_hat, k_hat = q[..., :width], k[..., :width].repeat_interleave(group, 2)
    far_q, far_k = (_far(a, scale, x.scheme.qk) for a, scale in ((q_hat, x.q_scale), (k_hat, x.k_scale)))
    root = width**0.5
    lengths = [torch.linalg.vector_norm(a, dim=-1).amax() for a in (q_hat, k_hat)]
    allowed = root * (far_q * (lengths[1] + root * far_k) + far_k * lengths[0])
    assert float((s - found).abs().max()) <= float(allowed) * (1 + 1e-3) + 1e3 * EPS * float(s.abs().max())


def assert_near(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor) -> None:
    over = (got - want).abs() - allowed
    assert not over.numel() or float(over.max()) <= 0.0, f"off by {float(over.max())} more than a code allows"


def _far(x: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """How far a number may be from its code, at most."""
    return scale.double().amax() / 2 if kind != "fp8" else x.abs().amax() / 16


def _of_values(x: Quantized) -> torch.Tensor:
    """How far values may be from what their codes say."""
    v = x.numbers()[2]
    apart = replace(x, v_mean=None).numbers()[2].abs()
    bits = {torch.float8_e4m3fn: 2.0**-4, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[x.v.dtype]
    # below its normal numbers float8 has steps of 2**-9, of which half a scale's
    least = 2.0**-24 if x.v_scale is None else 2.0**-10 * float(x.v_scale.max()) if x.v_scale.numel() else 0.0
    return apart * bits * (1 + 2.0**-3) + least + 4 * EPS * (v.abs() + apart)


def _variant(
    scheme: Scheme, side: str, sums: bool = False, turns: bool = False
) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        """Heads of 128, or of 100 (64 where they are rotated), or of 256."""
        dim = {4096: 128, 1000: 64 if scheme.rotate != "none" else 100}.get(width, 256)
        layout = tw.Packed(torch.tensor([0, 100, 300], dtype=torch.int32)) if width == 1000 else tw.Dense()
        lead = (300,) if width == 1000 else (2, 256)
        x, mean = torch.zeros(*lead, 4, dim, dtype=dtype), torch.zeros(2, 2, dim)
        other = mean if side == "q" and "k" in scheme.smooth else None
        table = torch.zeros(300, dim // 2)
        rope = tw.Rope(table, table, torch.zeros(x.shape[:-2].numel(), dtype=torch.int32)) if turns else None
        call = make_call(side[0], x, scheme, layout, other, sums, rope)
        if side == "kv":
            call.take_along(make_call("v", x, scheme, layout))
        return QUANTIZE, call

    return make


VARIANTS = {
    "q thread": _variant(tw.Sage2("int4"), "q"),
    "q rotated": _variant(replace(tw.Sage2(), rotate="hadamard"), "q"),
    "q turned": _variant(tw.Sage2(), "q", turns=True),
    "k turned": _variant(tw.Sage2(), "k", turns=True),
    "q head": _variant(tw.FP8(), "q"),
    "q sums": _variant(tw.Sage2(), "q", sums=True),
    "k sums": _variant(tw.Sage("fp8"), "k", sums=True),
    "k thread": _variant(tw.Sage2(), "k"),
    "k token": _variant(tw.Sage("fp8", k_scale="token"), "k"),
    "k rotated": _variant(replace(tw.Sage2(), rotate="hadamard"), "k"),
    "v channel": _variant(tw.Sage(smooth=("v",)), "v"),
    "k and v": _variant(tw.Sage2(), "kv"),
    "v block": _variant(tw.FP8(v_scale="block"), "v"),
    "v numbers": _variant(tw.Sage(pv="fp16", smooth=("v",)), "v"),
}
