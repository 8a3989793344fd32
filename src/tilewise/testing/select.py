"""Rows of scores from which tiles are taken, and what must hold on any device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.ops.operation import Operation
from tilewise.ops.select.problem import Call
from tilewise.ops.select.table import TAKE

NEAR = 2.0**-16  # of a row's weights: what float32 sums of them may be off by


@dataclass(frozen=True)
class RowsCase:
    """`kind` and amounts for each head; `alike` says whether self-similarities come in."""

    kind: str
    amounts: tuple[float, ...]
    alike: bool = False
    shape: tuple[int, int, int, int] = (2, 4, 5, 37)
    heads_kv: int = 2

    def __repr__(self) -> str:
        return f"{self.kind} {self.amounts} {self.shape}{' alike' * self.alike}"


_AMOUNTS = {
    "mass": ((0.5,) * 4, (0.9, 1.0, 0.01, 0.999)),
    "count": ((1.0,) * 4, (3.0, 7.0, 36.0, 100.0)),
    "share": ((0.3,) * 4, (0.07, 1.0, 0.5, 1e-6)),
    "weight": ((0.05,) * 4, (0.0, 0.3, 1.0, 0.01)),
}
CASES = [
    *(RowsCase(kind, amounts, alike) for kind in _AMOUNTS for amounts in _AMOUNTS[kind] for alike in (False, True)),
    RowsCase("mass", (0.9,), shape=(1, 1, 3, 1), heads_kv=1),
    RowsCase("mass", (0.9, 0.8), True, (1, 2, 2, 300), 1),
    RowsCase("share", (0.25, 0.25), True, (1, 2, 1, 16), 2),
]


def make_call(case: RowsCase, device: str = "cpu") -> Call:
    """Scores among which are equal ones, both infinities and NaN, rows that see nothing, and heads that share keys."""
    batch, heads, rows, tiles = case.shape
    generator = torch.Generator().manual_seed(len(case.kind) + tiles)
    scores = torch.randn(case.shape, generator=generator) * 2
    classes = torch.randint(0, 3, (1, heads, rows, tiles), generator=generator, dtype=torch.int8)
    scores[0, 0, 0, tiles // 4 : tiles // 2] = 1.5
    scores[-1, -1, -1] = -torch.inf
    scores[-1, 0, -1, : tiles // 3] = -torch.inf
    if rows > 4:
        classes[0, 0, 2] = 0
        scores[0, 1, 1, 3] = torch.nan
        scores[0, 1, 2, 3] = torch.inf
        scores[1, 1, 3] = 0.0
        scores[1, 1, 3, ::2] = -0.0
    alike_q, alike_k = (
        torch.rand(shape, generator=generator) for shape in (case.shape[:3], (batch, case.heads_kv, tiles))
    )
    of_q, of_k = (alike_q.to(device), alike_k.to(device)) if case.alike else (None, None)
    least, amount = (x.to(device) for x in (torch.linspace(0.2, 0.5, heads), torch.tensor(case.amounts)))
    return Call(scores.to(device), classes.to(device), of_q, of_k, least, amount, case.kind)


def check(case: RowsCase, impl: str | None, device: str = "cpu") -> None:
    """The tiles of the specification; but for one tile of a row whose weights so far are as near to enough as sums of
    float32 can tell.
    """
    (got,) = TAKE(make_call(case, device), impl)
    call = make_call(case)
    (want,) = TAKE(call, "reference")
    apart = got.cpu() != want
    for b, h, m in itertools.product(*map(range, case.shape[:3])):
        if apart[b, h, m].any():
            assert case.kind in ("mass", "weight"), f"row {b, h, m} differs"
            assert int(apart[b, h, m].sum()) == 1, f"row {b, h, m} differs by {int(apart[b, h, m].sum())} tiles"
            p = torch.softmax(call.scores[b, h, m].double().masked_fill(call.classes[0, h, m] == 0, -torch.inf), 0)
            at = float(p[want[b, h, m]].sum()) if case.kind == "mass" else float(p[apart[b, h, m]].sum())
            assert abs(at - case.amounts[h]) <= NEAR, f"row {b, h, m} differs without being near"


def _variant(kind: str, alike: bool) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        """Rows of 1,024 tiles, of 100, or as many as there may be."""
        tiles = {4096: 1024, 1000: 100}.get(width, 16384)
        scores, classes = torch.zeros(2, 4, 3, tiles), torch.zeros(1, 1, 3, tiles, dtype=torch.int8)
        of_q, of_k = (torch.zeros(2, 4, 3), torch.zeros(2, 2, tiles)) if alike else (None, None)
        return TAKE, Call(scores, classes, of_q, of_k, torch.zeros(4), torch.zeros(4), kind)

    return make


VARIANTS = {
    "mass": _variant("mass", False),
    "mass alike": _variant("mass", True),
    "count": _variant("count", False),
    "share": _variant("share", True),
    "weight": _variant("weight", False),
}
