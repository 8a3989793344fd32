"""Calls that are refused: the error names what the nearest implementations lack, and one only if it runs the call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core import dispatch
from tilewise.core.dispatch import NAMED, Need, Row
from tilewise.core.errors import UnsupportedError
from tilewise.ops.attention.table import ROWS

Arguments = dict[str, Any]


def _dense(grad: bool = False, dtype: torch.dtype = torch.float32, **more: Any) -> Arguments:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, heads, 16, dtype=dtype, requires_grad=grad) for heads in (4, 2, 2))
    return {"q": q, "k": k, "v": v, **more}


def _paged(grad: bool = False, **more: Any) -> Arguments:
    torch.manual_seed(0)
    pages = [torch.randn(3, 16, 2, 16, requires_grad=grad) for _ in range(2)]
    layout = tw.Paged(torch.tensor([[0, 2]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32))
    return {"q": torch.randn(1, 4, 4, 16), "k": pages[0], "v": pages[1], "layout": layout, **more}


# name of the call -> (arguments, whether an implementation can run it)
REFUSED: dict[str, tuple[Callable[[], Arguments], bool]] = {
    "codes and dropout": (lambda: _dense(quantize=tw.Sage2(), dropout=0.1), False),
    "codes and no batch": (lambda: _dense(quantize=tw.Sage2(), batch_invariant=True), False),
    "codes, by an exact one": (lambda: _dense(quantize=tw.Sage2(), impl="cpu_tiled"), True),
    "codes and dropout, by the specification": (
        lambda: _dense(quantize=tw.Sage2(), dropout=0.1, impl="reference"),
        False,
    ),
    "exact, by one over codes": (lambda: _dense(impl="cpu_codes"), True),
    "a window, by the fused kernel": (lambda: _dense(mask=tw.window(3), impl="cpu_sdpa"), True),
    "dropout, by the fused kernel": (lambda: _dense(dropout=0.5, seed=1, impl="cpu_sdpa"), True),
    "a sink, by the fused kernel": (lambda: _dense(sink=torch.zeros(4), impl="cpu_sdpa"), True),
    "on a CPU, by a kernel of GPUs": (lambda: _dense(impl="triton"), True),
    "on a CPU, by a kernel of Hopper": (lambda: _dense(impl="hopper_decode"), True),
    "float64, by a kernel of GPUs": (lambda: _dense(dtype=torch.float64, mask=tw.causal, impl="triton"), True),
    "pages, by a dense one": (lambda: _paged(impl="triton_decode"), True),
    "gradients of pages": (lambda: _paged(grad=True), True),
    "gradients of pages, by a tiled one": (lambda: _paged(grad=True, impl="cpu_tiled"), True),
    "invariant, by the fused kernel": (lambda: _dense(batch_invariant=True, impl="cpu_sdpa"), True),
    "no small weights, by the specification": (lambda: _dense(select=tw.Sparge(lam=5.0), impl="reference"), True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_implementation_that_is_named_in_a_hint_runs_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    make, some = REFUSED[name]
    arguments = make()
    with pytest.raises(UnsupportedError) as refused:
        tw.attention(**arguments)
    hinted = re.findall(r"impl='(\w+)'", refused.value.hint)
    assert bool(hinted) == some, refused.value.hint
    assert "tilewise.why" in refused.value.hint
    for impl in hinted:
        arguments["impl"] = impl
        assert tw.attention(**arguments).isfinite().all()
    for row in () if hinted else ROWS:
        with pytest.raises(UnsupportedError):
            tw.attention(**{**arguments, "impl": row.name})


def test_the_nearest_two_say_all_that_they_lack() -> None:
    with pytest.raises(UnsupportedError) as refused:
        tw.attention(**_dense(quantize=tw.Sage2(), dropout=0.25))
    assert refused.value.expected == (
        "for cpu_tiled: no quantize= (got Sage); or for cpu_codes: no dropout (got dropout 0.25)"
    )
    with pytest.raises(UnsupportedError, match=r"no sink \(got a sink\), no dropout \(got dropout 0.25\)\. Hint"):
        tw.attention(**_dense(sink=torch.zeros(4), dropout=0.25, impl="cpu_sdpa"))


def test_of_two_that_lack_the_same_one_is_listed_and_those_that_lack_least_come_first() -> None:
    def need(says: str) -> Need[str]:
        return Need(says, lambda call: "it" if says in call else None)

    a, b, c = need("a"), need("b"), need("c")
    rows = [Row(f"r{n}", "", needs, "") for n, needs in enumerate([(a, b, c), (a, b), (a, b), (c,), (c,)])]
    with pytest.raises(UnsupportedError) as refused:
        dispatch.choose(rows, "op", "a b c", None)
    assert refused.value.expected == "for r3: c (got it); or for r1: a (got it), b (got it)"
    assert "no implementation can run it" in refused.value.hint
    with pytest.raises(UnsupportedError, match=r"op: .* expected for r0: a \(got it\)\. Hint: impl='r3' can run"):
        dispatch.choose([rows[0], Row("r3", "", (c,), "", prefers=(NAMED,))], "op", "a", None)


@pytest.mark.parametrize("name", REFUSED)
def test_every_need_of_every_implementation_answers(name: str) -> None:
    """The error evaluates them all, also those behind one that failed."""
    arguments = REFUSED[name][0]()
    refused = 0
    for row in ROWS:
        try:
            tw.attention(**{**arguments, "impl": row.name})
        except UnsupportedError:
            refused += 1
    assert refused
