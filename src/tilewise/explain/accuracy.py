"""Accuracy of quantized attention on your q, k and v: each scheme's error against exact attention, its bytes and time,
and the fastest scheme that is accurate enough, for all heads or per head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

import tilewise as tw
from tilewise.core.errors import InputError, TilewiseError
from tilewise.formula.walk import transform
from tilewise.quant.schemes import Scheme

MOST_SCORES = {"cpu": 1 << 24, "cuda": 1 << 28}  # of float64 at once, while exact rows are computed
_SCALES = ("head", "block", "warp", "thread", "token", "channel")  # from few to many
PUBLISHED: dict[str, Scheme] = {
    "Sage1()": tw.Sage1(),
    "Sage2()": tw.Sage2(),
    "Sage2(int4)": tw.Sage2("int4"),
    "Sage2pp()": tw.Sage2pp(),
    "FA3FP8()": tw.FA3FP8(),
}
SCHEMES: tuple[Scheme, ...] = (
    *PUBLISHED.values(),
    tw.Sage(rotate="hadamard"),
    tw.Sage(smooth=("q", "k")),
    tw.Sage(smooth=("q", "k", "v")),
    tw.Sage(q_scale="token", k_scale="token"),
    tw.Sage(q_scale="token", k_scale="token", smooth=("q", "k", "v"), rotate="hadamard"),
    tw.Sage(qk="int4", smooth=("q", "k"), rotate="hadamard"),
    tw.Sage(pv="bf16", q_scale="token", k_scale="token", smooth=("q", "k")),
    tw.Sage("fp8", v_scale="block"),
    tw.FP8(rotate="hadamard"),
    tw.FP8("block", "block", "block"),
    tw.FP8(q_scale="token", k_scale="token", v_scale="channel", rotate="hadamard"),
)


def name_of(scheme: Scheme | None) -> str:
    """A scheme as text, which `tilewise tune-quant --scheme` reads.

    Args:
        scheme: a `tilewise.Sage` or `tilewise.FP8`; None is no scheme.

    Returns:
        The name of a published scheme, or the fields that differ from the defaults.

    Example:
        >>> from tilewise.explain.accuracy import name_of
        >>> name_of(tw.Sage2()), name_of(tw.Sage(rotate="hadamard"))
        ('Sage2()', 'Sage(rotate=hadamard)')
    """
    for name, published in PUBLISHED.items():
        if scheme == published:
            return name
    if scheme is None:
        return "as they are"
    words = []
    for field in fields(scheme):
        value = getattr(scheme, field.name)
        if value != field.default:
            text = f"({','.join(value)}{',' if len(value) == 1 else ''})" if isinstance(value, tuple) else value
            words.append(f"{field.name}={text}")
    return f"{type(scheme).__name__}({','.join(words)})"


@dataclass(frozen=True)
class Accuracy:
    """How far a result is from the exact one: over all its numbers, and by head.

    `cosine` of both as vectors, `relative_l1` the sum of absolute differences over that of exact absolute numbers,
    `rmse` the root of the mean square difference, `largest` the largest difference; `heads` has relative_l1 of each.
    """

    cosine: float
    relative_l1: float
    rmse: float
    largest: float
    heads: tuple[float, ...]

    @property
    def worst_head(self) -> int:
        """The head of the largest relative_l1; a NaN is larger than any number."""
        return max(range(len(self.heads)), key=lambda h: math.inf if math.isnan(self.heads[h]) else self.heads[h])


@dataclass(frozen=True)
class Trial:
    """One scheme on one layer; None for q, k and v as they are. `nbytes` are those of what attention reads, `ms` the
    median of a call, codes made and all, None where none was timed.
    """

    scheme: Scheme | None
    accuracy: Accuracy
    nbytes: int
    ms: float | None

    def error(self, head: int | None = None) -> float:
        """relative_l1 of a head, None: of all numbers."""
        return self.accuracy.relative_l1 if head is None else self.accuracy.heads[head]


@dataclass(frozen=True)
class Trials:
    """All schemes on one layer: those that ran, and why others did not."""

    ran: tuple[Trial, ...]
    left_out: tuple[tuple[Scheme, str], ...]

    def choose(self, max_error: float, head: int | None = None, *, by_time: bool) -> Trial | None:
        """The fastest whose error, of `head` or of all heads, is at most `max_error`; None where there is none.

        `by_time`: by measured times. Else by `cost`, which is an order and no prediction, then by error.
        """
        fit = [trial for trial in self.ran if trial.error(head) <= max_error]
        if not by_time:
            return min(fit, key=lambda trial: (*cost(trial.scheme), trial.error(head)), default=None)
        if any(trial.ms is None for trial in fit):
            raise InputError("by_time", got="trials without times", expected="timed ones", hint="try_schemes(clock=)")
        return min(fit, key=lambda trial: trial.ms or 0.0, default=None)


def cost(scheme: Scheme | None) -> tuple[int, int, int]:
    """The order of schemes where no time says it, cheapest least: bits of the operands of both products; then how many
    of q, k and v are centred and whether rotated; then how many numbers have a scale of their own.

    Numbers of int4 are kept as int8, so they count as 8 bits. None, nothing encoded, comes last.
    """
    if scheme is None:
        return 32, 0, 0
    bits = 8 + (8 if scheme.pv == "fp8" else 16)
    scales = sum(_SCALES.index(shared) for shared in (scheme.q_scale, scheme.k_scale, scheme.v_scale))
    return bits, len(scheme.smooth) + (scheme.rotate != "none"), scales


def accuracy(o: torch.Tensor, exact: torch.Tensor) -> Accuracy:
    """The error of a result of attention, computed in float64.

    If all exact numbers are 0, a relative error is 0 or infinite; the cosine of two zeros is 1.

    Args:
        o: (..., heads, head_dim_v).
        exact: the exact result, in the same shape.

    Returns:
        An `Accuracy`.

    Example:
        >>> from tilewise.explain.accuracy import accuracy
        >>> accuracy(torch.full((1, 2, 4, 8), 1.5), torch.ones(1, 2, 4, 8)).relative_l1
        0.5
    """
    o, exact = o.double(), exact.double()
    off = o - exact
    others = [dim for dim in range(o.ndim) if dim != o.ndim - 2]
    by_head = relative(off.abs().sum(others), exact.abs().sum(others))
    norms = torch.linalg.vector_norm(o) * torch.linalg.vector_norm(exact)
    both_zero = not bool(norms) and not bool(off.any())
    return Accuracy(
        cosine=1.0 if both_zero else float((o * exact).sum() / norms),
        relative_l1=float(relative(off.abs().sum(), exact.abs().sum())),
        rmse=float(off.square().mean().sqrt()),
        largest=float(off.abs().max()),
        heads=tuple(by_head.tolist()),
    )


def relative(off: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """One over the other; 0 where both are."""
    return torch.where((off == 0) & (size == 0), 0.0, off / size)


def picked(seqlen_q: int, rows: int | None) -> torch.Tensor:
    """Which queries are looked at: `rows` of them, spread evenly from the first to the last, or all for None."""
    if rows is None or rows >= seqlen_q:
        return torch.arange(seqlen_q)
    return torch.linspace(0, seqlen_q - 1, rows, dtype=torch.float64).round().long()


def exact_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: tw.Mask | None = None,
    scale: float | None = None,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Exact attention in float64 of some queries alone, where the tensors are.

    Args:
        q, k, v: (batch, seqlen, heads, dim), as `tilewise.attention` takes them.
        mask, scale: likewise; a query keeps its position.
        rows: int64 (n,), which queries.

    Returns:
        (batch, n, num_heads_q, head_dim_v), float64, on a CPU.
    """
    q, k, v = (x.detach().double() for x in (q, k, v))
    rows = rows.to(q.device)
    shift = k.shape[1] - q.shape[1]
    found = []
    for some in torch.split(rows, max(1, MOST_SCORES[q.device.type] // max(1, q.shape[0] * q.shape[2] * k.shape[1]))):
        seen = None if mask is None else _of_rows(mask, some + shift, k.shape[1] - len(some))
        found.append(tw.attention(q[:, some], k, v, mask=seen, scale=scale, impl="reference").cpu())
    return torch.cat(found, 1) if found else torch.zeros(q.shape[0], 0, q.shape[2], v.shape[-1], dtype=torch.float64)


def _of_rows(mask: tw.Mask, places: torch.Tensor, shift: int) -> tw.Mask:
    """The mask for queries that stand at `places` and are given in their order."""

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        def put(node: Any, args: Any) -> Any:
            return places[i - shift] if node.op == "sym" and node.value == "i" else None

        return transform(mask.expr, put)

    return tw.mask(seen, repr(mask))


def try_schemes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    schemes: Iterable[Scheme] = SCHEMES,
    *,
    mask: tw.Mask | None = None,
    scale: float | None = None,
    rows: int | None = None,
    clock: Callable[[Callable[[], object]], float] | None = None,
) -> Trials:
    """Run attention with each scheme, and without one, and compare with exact attention in float64.

    Args:
        q, k, v: (batch, seqlen, heads, dim), float16, bfloat16 or float32, as `tilewise.attention` takes them.
        schemes: the schemes to try. Those that cannot run on these tensors are left out, with the reason.
        mask, scale: as `tilewise.attention` takes them.
        rows: how many queries are compared, evenly spaced; None: all. Attention itself runs for all queries.
        clock: returns the milliseconds of a call, for `Trial.ms`; None times nothing.

    Returns:
        The trials that ran, the one without a scheme first, and the schemes that were left out.

    Raises:
        InputError, FormulaError: q, k, v or mask are wrong. A scheme that cannot run raises nothing.

    Example:
        >>> from tilewise.explain.accuracy import try_schemes
        >>> trials = try_schemes(q, k, v, [tw.Sage1(), tw.Sage2()], mask=tw.causal)
        >>> [trial.error() < 0.1 for trial in trials.ran]  # without a scheme first
        [True, True, True]
    """
    tw.why(q, k, v, mask=mask, scale=scale)  # raises what is wrong whatever the scheme
    if not q.numel() or not v.numel():
        name, x = ("q", q) if not q.numel() else ("v", v)
        hint = "nothing is encoded where nothing is"
        raise InputError(name, got=f"shape {tuple(x.shape)}", expected="some numbers", hint=hint)
    some = picked(q.shape[1], rows)
    exact = exact_rows(q, k, v, mask=mask, scale=scale, rows=some)
    ran: list[Trial] = []
    left_out: list[tuple[Scheme, str]] = []
    with torch.no_grad():
        for scheme in (None, *schemes):
            call = functools.partial(tw.attention, q, k, v, mask=mask, scale=scale, quantize=scheme)
            try:
                o = call()
            except TilewiseError as error:
                if scheme is None:
                    raise
                left_out.append((scheme, str(error)))
                continue
            nbytes = q.nbytes + k.nbytes + v.nbytes
            if scheme is not None:
                nbytes = tw.quantize_qkv(q, k, v, scheme=scheme).nbytes
            found = accuracy(o[:, some.to(o.device)].cpu(), exact)
            ran.append(Trial(scheme, found, nbytes, None if clock is None else clock(call)))
    return Trials(tuple(ran), tuple(left_out))
