"""Cases of attention in few bits, and what must hold of them on any device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.attention.problem import make_call
from tilewise.ops.attention.reference import attention_reference
from tilewise.ops.attention.reference_codes import attention_of_codes
from tilewise.quant import Quantized
from tilewise.quant.schemes import KEYS, Scheme
from tilewise.testing.weight_codes import (
    LEAST_OF_KEPT,
    LINE,
    LINE_LEAST,
    LINE_OF_KEPT,
    cut_sums,
    scores_of,
    weighed,
)

WEIGHTS = {"fp8": 2.0**-4, "fp16": 2.0**-11, "bf16": 2.0**-8}  # what rounding changes a weight by, relatively, at most
OUTPUTS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
LEAST = 2.0**-10  # half a step of FP8 below its normal numbers
KEPT = 2.0**-13  # what Hopper's tensor cores cut off a sum of products of FP8, relatively, every 32 columns


@dataclass(frozen=True)
class CodedCase:
    """Queries and keys of some lengths under a formula, which `made` gives on a device: arguments of `attention`."""

    name: str
    scheme: Scheme
    made: Callable[[str], dict[str, Any]] = lambda device: {}
    lengths: tuple[tuple[int, int], ...] = ((150, 300), (150, 300))
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    dim_v: int = 64
    packed: bool = False

    def __repr__(self) -> str:
        return self.name


def _causal(device: str) -> dict[str, Any]:
    return {"mask": tw.causal}


def _capped(device: str) -> dict[str, Any]:
    return {"mask": tw.causal, "score": tw.softcap(20.0)}


def _slopes(device: str) -> dict[str, Any]:
    return {"mask": tw.causal, "score": tw.alibi(torch.linspace(0.1, 0.5, 4, device=device))}


def _sink(device: str) -> dict[str, Any]:
    return {"sink": torch.linspace(-1.0, 2.0, 4, device=device)}


def _documents(device: str) -> dict[str, Any]:
    return {"mask": tw.causal & tw.document((torch.arange(300) // 70).to(device))}


def _half_empty(device: str) -> dict[str, Any]:
    return {"mask": lambda b, h, i, j: (j < 50) & (i > 220), "sink": None}


RAGGED = ((5, 0), (0, 3), (129, 200), (64, 128), (1, 1), (63, 65), (9, 100))
_ROTATED = tw.Sage(smooth=("k", "v"), rotate="hadamard")
FP8_VALUES = [  # that every kernel takes
    CodedCase("sage2", tw.Sage2()),
    CodedCase("sage2_causal", tw.Sage2(), _causal),
    CodedCase("sage2pp", tw.Sage2pp(), _causal),
    CodedCase("fp8_rotated", tw.Sage("fp8", rotate="hadamard"), _causal, dim=128, dim_v=128),
    CodedCase("rotated_centred_values", _ROTATED, _causal),
    CodedCase("fa3", tw.FA3FP8(), _causal, dim=128, dim_v=128),
    CodedCase("blocks", tw.FP8("block", "block", "channel"), dim=128, dim_v=64),
    CodedCase("tokens", tw.Sage(q_scale="token", k_scale="token"), _causal),
    CodedCase("warps", tw.Sage(q_scale="warp", k_scale="block", smooth=("v",)), lambda device: {"mask": tw.window(90)}),
    CodedCase("nothing_centred", tw.Sage("int4", smooth=())),
    CodedCase("softcap", _ROTATED, _capped),
    CodedCase("slopes", tw.Sage2(), _slopes),
    CodedCase("positions", tw.Sage2(), lambda device: {"score": lambda s, b, h, i, j: s - 0.01 * (i - j) * (i - j)}),
    CodedCase("sink", _ROTATED, _sink),
    CodedCase("documents", tw.Sage2(), _documents, ((300, 300),)),
    CodedCase("every_third_key", tw.Sage2(), lambda device: {"mask": lambda b, h, i, j: j % 3 == 1}),
    CodedCase("half_empty", _ROTATED, _half_empty),
    CodedCase("other_scale", tw.Sage2(), lambda device: {"scale": -0.1}),
    CodedCase("heads_of_96", tw.Sage2(), _causal, dim=96, dim_v=48),
    CodedCase("wide_heads", tw.Sage2(), _causal, ((70, 200),), dim=256, dim_v=192),
    CodedCase("wide_documents", tw.Sage2(), _documents, ((300, 300),), dim=192, dim_v=256),
    CodedCase("wide_packed", tw.FP8(v_scale="channel"), _sink, RAGGED, dim=256, dim_v=256, packed=True),
    CodedCase("wide_keys", tw.Sage(smooth=("k", "v")), _capped, dim=192, dim_v=128),
    CodedCase("one_query", tw.Sage2(), _causal, ((1, 129), (1, 129))),
    CodedCase("one_key", tw.Sage2(), lengths=((9, 1),)),
    *(CodedCase(f"keys_{n}", tw.Sage2(), _causal, ((n, n),)) for n in (9, 63, 65, 127, 257)),
    CodedCase("packed", tw.Sage2(), _causal, RAGGED, packed=True),
    CodedCase("packed_fp8", tw.FP8(v_scale="channel"), lambda device: {}, RAGGED, dim=128, dim_v=128, packed=True),
    CodedCase("packed_centred", _ROTATED, _sink, RAGGED, packed=True),
    CodedCase("value_blocks", tw.FP8("token", "block", "block"), _sink),
    CodedCase("value_blocks_causal", tw.Sage("fp8", smooth=("k", "v"), v_scale="block"), _causal, dim=128, dim_v=128),
    CodedCase("value_blocks_packed", tw.Sage(v_scale="block"), _sink, RAGGED, packed=True),
    CodedCase("value_blocks_wide", tw.FP8("block", "block", "block"), _documents, ((300, 300),), dim=192, dim_v=256),
    CodedCase("no_queries", tw.Sage2(), lengths=((0, 5),)),
    CodedCase("no_keys", tw.Sage2(), _sink, ((5, 0),)),
]
OTHERS = [  # that kernels may leave to others
    CodedCase("sage1", tw.Sage1(), _causal),
    CodedCase("sage2_int4", tw.Sage2("int4"), _causal),
    CodedCase("all_centred_packed", tw.Sage("fp8", "bf16", "block", "thread", ("q", "k", "v")), _causal, RAGGED,
              packed=True),
    CodedCase("centred_softcap", tw.Sage(smooth=("q", "k", "v"), rotate="hadamard"), _capped),
    CodedCase("odd_heads", tw.Sage2(), _causal, dim=7, dim_v=33),
]  # fmt: skip
CASES = [*FP8_VALUES, *OTHERS]


def make_inputs(
    case: CodedCase, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """[q, k, v], keys and values away from 0, and the other arguments."""
    generator = torch.Generator().manual_seed(seed)
    made: list[torch.Tensor] = []
    for side, heads, dim in (
        (0, case.heads[0], case.dim),
        (1, case.heads[1], case.dim),
        (1, case.heads[1], case.dim_v),
    ):
        lengths = [both[side] for both in case.lengths]
        lead = (sum(lengths),) if case.packed else (len(lengths), lengths[0])
        x = torch.randn(*lead, heads, dim, generator=generator)
        shift = torch.randn(dim, generator=generator) if made else 0.0
        made.append((x + shift).to(device, dtype))
    arguments = {name: x for name, x in case.made(device).items() if x is not None}
    if case.packed:
        cu = [torch.tensor([0, *itertools.accumulate(both[n] for both in case.lengths)]) for n in (0, 1)]
        arguments["layout"] = tw.Packed(*(x.to(device, torch.int32) for x in cu))
    return made, arguments


def probabilities(x: Quantized, arguments: dict[str, Any]) -> torch.Tensor:
    """Those of the codes in float64, (..., queries, heads, keys of all sequences): outputs for values that are 1 at one
    key.
    """
    q, k, _ = x.numbers()
    rows, dim = x.k.shape[-3], x.q.shape[-1]
    eye = torch.eye(rows, dtype=torch.float64, device=q.device)[:, None].expand(*x.k.shape[:-1], rows)
    call = make_call(q[..., :dim], k[..., :dim], k[..., :dim], layout=x.layout, **arguments)
    return attention_reference(replace(call, q=q, k=k, v=eye))[0]  # wider than values of users


def lost(x: Quantized, scale: float) -> torch.Tensor:
    """How far scores of FP8 may be off where tensor cores sum them, at most, (..., queries, heads): for the key whose
    products are largest.
    """
    q, k = (x.rows(side, torch.float64).abs() for side in ("q", "k"))
    k = k.repeat_interleave(q.shape[-2] // k.shape[-2], -2)
    most = torch.einsum("...ihd,...jhd->...ihj", q, k).amax(-1)
    return most * abs(scale) * KEPT * -(-q.shape[-1] // 32)


def one_head(keys: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """[q, k, v] of one head and 192 queries."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(1, n, 1, dim, generator=generator).to(device, dtype) for n in (192, keys, keys)]


def with_first_key(keys: int, dim: int, dtype: torch.dtype, score: float, device: str = "cpu") -> list[torch.Tensor]:
    """`one_head`, all of whose queries have a score near to `score` with the first key."""
    q, k, v = one_head(keys, dim, dtype, device)
    q[..., 0] = 8.0
    k[0, 0, 0, 0] = score * dim**0.5 / 8.0
    return [q, k, v]


def _lost_by_sums(x: Quantized, w: torch.Tensor) -> torch.Tensor:
    """What `cut_sums` of weights times codes of values, and of weights, changes o by."""
    values = x.values(torch.float64).transpose(1, 2)
    scale = torch.ones_like(values[..., :1, :])
    if x.v_scale is not None and x.scheme.v_scale == "channel":
        scale = x.of_sequences(x.v_scale, "k", torch.float64).transpose(1, 2)
    o = cut_sums(w, values / scale) * scale / cut_sums(w, torch.ones_like(values[..., :1]))
    return (o - w @ values / w.sum(-1, keepdim=True)).abs().transpose(1, 2)


def check_codes_of_weights(
    tensors: Sequence[torch.Tensor], scheme: Scheme, impl: str, coded: Callable[[Quantized, float], torch.Tensor],
    sums_of_codes: bool,
) -> None:  # fmt: skip
    """The largest difference of o from what the same codes, of weights too, give when nothing else is rounded is what
    rounding of the largest output to its dtype explains.

    But for bits that sums of products of FP8 lose (`KEPT`, and what `cut_sums` does), and for weights that lie as near
    to the middle between two codes as scores of float32 are exact: these may be either.

    Args:
        tensors: q, k, v (batch, seqlen, heads, head_dim) with as many heads of keys as of queries, nothing hidden.
        scheme: whose scores are exact sums: of INT8.
        impl: a row of the dispatch table.
        coded: weights, 2 ** `scores_of`, where scores are `off` from what they are, as `hopper_weights`.
        sums_of_codes: what divides them is the sum of codes, else of what they are codes of.
    """
    o = tw.attention(*tensors, quantize=scheme, impl=impl).detach()
    x = tw.quantize_qkv(*(y.detach() for y in tensors), scheme=scheme)
    s = scores_of(x)
    near = 2.0**-22 * (1.0 + float(s.abs().max()))
    w, less, more = (coded(x, off) for off in (0.0, -near, near))
    total = (w if sums_of_codes else torch.exp2(s)).sum(-1, keepdim=True)
    want = weighed(x, w / total)
    either, sizes = ((more - w).abs() + (w - less).abs()) / total, x.values(torch.float64).abs()
    doubt = torch.einsum("bhij,bjhd->bihd", either, sizes)
    doubt += either.sum(-1).transpose(1, 2)[..., None] * want.abs()
    cut = KEPT * (KEYS // 32) if scheme.pv == "fp8" else 2.0**-23 * (x.k.shape[1] // 16 + 1)  # by tensor cores
    if o.is_cuda:
        doubt += cut * (torch.einsum("bhij,bjhd->bihd", w / total, sizes) + want.abs())
        if sums_of_codes:
            doubt += _lost_by_sums(x, w)
    half_step = 2.0 ** math.floor(math.log2(float(want.abs().max()))) * torch.finfo(o.dtype).eps / 2
    off = (o.double() - want).abs()
    assert bool((off <= half_step + doubt + 2.0**-20 * want.abs()).all()), (
        f"off by {float(off.max())}, half a step is {half_step}"
    )


def check_forward(case: CodedCase, dtype: torch.dtype, impl: str, device: str = "cpu", exact_sums: bool = True) -> None:
    """Results are those of the codes, but for the rounding of weights, outputs and float32 sums.

    Scores of FP8 lose bits on a GPU (`lost`). A weight is off by at most `WEIGHTS` of itself, or below FP8's normal
    numbers by `LEAST` of the largest one's code; where weights are summed as codes, these are `hopper_weights`, off by
    `LINE` and `LINE_LEAST`, or `LINE_OF_KEPT` and `LEAST_OF_KEPT`. Of many weights these errors have no direction, so
    the sum of their squares bounds the square of a sum: not in each number, but in all of them together. Sums of
    rounded weights are off likewise.
    """
    (q, k, v), arguments = make_inputs(case, dtype, device)
    o, lse = tw.attention_with_lse(q, k, v, quantize=case.scheme, impl=impl, **arguments)
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    if not q.numel() or not k.numel():
        exact = tw.attention_with_lse(q, k, v, impl="reference", **arguments)
        assert torch.equal(o, exact[0])
        torch.testing.assert_close(lse, exact[1])
        return
    layout = arguments.pop("layout", None)
    x = tw.quantize_qkv(q.detach(), k.detach(), v.detach(), scheme=case.scheme, layout=layout)
    want, want_lse = attention_of_codes(x, **arguments)
    p = probabilities(x, arguments)
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    group = case.heads[0] // case.heads[1]
    values = x.values(torch.float64).repeat_interleave(group, -2)
    most = p.amax(-1, keepdim=True)
    bit, step = WEIGHTS[case.scheme.pv], LEAST if case.scheme.pv == "fp8" else 0.0
    if not exact_sums:
        bit, step = (LINE, LINE_LEAST) if case.scheme.qk == "fp8" else (LINE_OF_KEPT, LEAST_OF_KEPT)
    step /= case.scheme.p_largest
    wrong = p * bit + torch.where(p > 0, most * step, 0.0)  # of a weight
    if dtype == torch.bfloat16 or device != "cpu":
        wrong = wrong + p * 2.0**-18  # scores in float32, exponentials of the GPU
    scores = torch.zeros_like(p[..., 0])
    if case.scheme.qk == "fp8" and device != "cpu":
        scores = lost(x, arguments.get("scale", case.dim**-0.5))
        wrong = wrong + p * scores[..., None]
    allowed = torch.einsum("...ihj,...jhd->...ihd", wrong**2, values**2)
    allowed += (wrong**2).sum(-1, keepdim=True) * want**2
    rounding = OUTPUTS[dtype] * (want.abs() + torch.einsum("...ihj,...jhd->...ihd", p, values.abs()) * 2.0**-4)
    off = o.detach().double() - want
    assert float(off.norm()) <= float(allowed.sum().sqrt() + rounding.norm()), "more than rounded weights explain"
    far = torch.einsum("...ihj,...jhd->...ihd", wrong, values.abs()) + wrong.sum(-1, keepdim=True) * want.abs()
    assert bool((off.abs() <= 1.25 * far + 2 * rounding + 2.0**-18).all()), "a number further off than any rounding"
    seen = want_lse > -torch.inf
    sums = (wrong**2).sum(-1).sqrt() if not exact_sums else torch.zeros_like(p[..., 0])
    apart = (lse.detach().double() - want_lse).abs()[seen]
    bound = scores.transpose(-1, -2)[seen] + 4 * sums.transpose(-1, -2)[seen] + 2.0**-16 * (8 + want_lse.abs()[seen])
    assert bool((apart <= bound).all()), f"lse off by {float(apart.max())}"


def check_values_apart(dtype: torch.dtype, impl: str, device: str = "cpu", dim: int = 64) -> None:
    """Blocks of values have scales that are 2**100 apart, some 0: who sees only small ones has these, not 0."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 600, 2, dim, generator=generator) for _ in range(3))
    sizes = torch.tensor([2.0**20, 2.0**-80, 0.0, 2.0**-60, 2.0**-70])
    v = v * sizes.repeat_interleave(KEYS)[:600, None, None]
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    scheme = tw.FP8("block", "block", "block")
    mask: Any = lambda b, h, i, j: (i % 2 == 0) | (j >= KEYS)  # noqa: E731
    for given in (mask, mask & tw.causal):
        o = tw.attention(q, k, v, mask=given, quantize=scheme, impl=impl)
        want, _ = attention_of_codes(tw.quantize_qkv(q, k, v, scheme=scheme), mask=given)
        off, norm = ((x.double() * 2.0**60).norm(dim=-1) for x in (o.double() - want, want))
        assert bool((off <= 2 * LINE * norm).all()), "a row lost its values"


def check_gradients(case: CodedCase, dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    """Gradients are those of exact attention over the numbers that codes stand for, by autograd in float64, but for
    weights that were rounded in the forward, by `WEIGHTS` at most, and roundings of the dtype.
    """
    (q, k, v), arguments = make_inputs(case, dtype, device)
    sink = arguments.get("sink")
    leaves = [x.requires_grad_() for x in (q, k, v)] + ([sink.requires_grad_()] if sink is not None else [])
    o = tw.attention(q, k, v, quantize=case.scheme, impl=impl, **arguments)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = torch.autograd.grad(o, leaves, do)
    with torch.no_grad():
        x = tw.quantize_qkv(q, k, v, scheme=case.scheme, layout=arguments.get("layout"))
        numbers = [n.double().requires_grad_() for n in x.whole(torch.float32)]
    if sink is not None:
        arguments["sink"] = sink.detach().double().requires_grad_()
    arguments.setdefault("scale", q.shape[-1] ** -0.5)
    want_o, _ = attention_reference(make_call(*numbers, **arguments))
    wanted = [*numbers, *([arguments["sink"]] if sink is not None else [])]
    want = torch.autograd.grad(want_o, wanted, do.double(), allow_unused=True, materialize_grads=True)
    for name, leaf, got, right in zip(("dq", "dk", "dv", "dsink"), leaves, found, want, strict=False):
        assert (got.dtype, got.shape) == (leaf.dtype, leaf.shape), name
        off = float((got.double() - right).norm())
        assert off <= (WEIGHTS[case.scheme.pv] + 4 * OUTPUTS[dtype]) * float(right.norm()) + 2.0**-18 * float(
            do.norm()
        ), f"{name}: {off}"
