"""Counts of what PyTorch's operators move, and that the fewest bytes are what the library's operations are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tilewise as tw
from tilewise.explain.neighbours import LOSS, SUBJECTS, in_operators, placed
from tilewise.explain.operators import Moved, moved
from tilewise.ops import cross_entropy, glu, norm, rope, softmax
from tilewise.ops.operation import Operation, fields_of

ROWS, WIDTH = 256, 512


def test_operators_are_counted_one_by_one() -> None:
    x, y = torch.ones(6, 8), torch.ones(8)
    assert moved(lambda: x + 1) == Moved(1, 6 * 8 * 4, 6 * 8 * 4, 6 * 8)
    assert moved(lambda: (x * y).sum()) == Moved(2, (48 + 8 + 48) * 4, (48 + 1) * 4, 2 * 48)
    assert moved(lambda: x.t()[:3].unsqueeze(0)) == Moved(0, 0, 0, 0)
    assert moved(lambda: x.add_(1)).bytes == 2 * 48 * 4
    assert moved(lambda: torch.empty_like(x)).bytes == 0
    assert moved(lambda: torch.zeros_like(x)) == Moved(1, 0, 48 * 4, 48)
    assert moved(lambda: x.copy_(y)) == Moved(1, 8 * 4, 48 * 4, 48)
    assert moved(lambda: y.expand(6, 8) * 2.0) == Moved(1, 8 * 4, 48 * 4, 48)


def test_a_backward_is_counted_too() -> None:
    x = torch.ones(6, 8, device="meta", requires_grad=True)
    do = torch.empty_like(x)
    assert moved(lambda: torch.autograd.grad(x.exp(), x, do)) == Moved(2, 3 * 48 * 4, 2 * 48 * 4, 2 * 48)


def test_a_loss_looks_up_one_logit_of_each_token() -> None:
    x, target = torch.zeros(6, 8, device="meta"), torch.zeros(6, dtype=torch.int64, device="meta")
    found = moved(lambda: F.nll_loss(x, target))
    assert found.loads == 6 * 8


def _calls(x: dict[str, torch.Tensor]) -> dict[str, Callable[[], tuple[Operation[Any], Any]]]:
    """The operation and the call behind each of the subjects."""

    def normed(centred: bool) -> tuple[Operation[Any], Any]:
        weights = (x["weight"], x.get("bias"), x.get("residual"))
        return norm.table.NORM, norm.problem.make_call(x["x"], *weights, centred, 1e-6, 0.0, None, None)

    def turned() -> tuple[Operation[Any], Any]:
        tables = tw.rope_tables(128, ROWS, device="meta")
        return rope.table.ROPE, rope.problem.make_call(x["x"], x["k"], tw.Rope(*tables, torch.arange(ROWS).to("meta")))

    return {
        "rms_norm": lambda: normed(False),
        "rms_norm, residual": lambda: normed(False),
        "layer_norm": lambda: normed(True),
        "softmax": lambda: (softmax.table.SOFTMAX, softmax.problem.make_call(x["x"], -1, None, 1.0, None, log=False)),
        "swiglu": lambda: (glu.table.GLU, glu.problem.make_call(x["x"], None, "silu")),
        "rope": turned,
        "cross_entropy": lambda: (
            cross_entropy.table.CROSS_ENTROPY,
            cross_entropy.problem.make_call(x["x"], x["target"], -100, 0.0, 0.0, "mean"),
        ),
    }


def _nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("name", [*SUBJECTS, "cross_entropy"])
def test_the_fewest_bytes_are_what_an_operation_is_given_and_gives(name: str) -> None:
    subject = (SUBJECTS | {"cross_entropy": LOSS})[name]
    with torch.device("meta"):
        inputs = placed(subject.make(ROWS, WIDTH), "meta", torch.float32)
        operation, call = _calls(inputs)[name]()
        results = operation.results(call)
        kept = operation.kept(call, results)
        incoming = dict(list(results.items())[: operation.count(call)])
        wanted = operation.sources(key for key, t in fields_of(call).items() if t.requires_grad)
        gradients = operation.gradients(operation.without(call, kept), kept, wanted)
    forward, backward = subject.fewest(inputs)
    # beside tensors as large as x there are weights, tables, statistics: less than a fifth at this size
    assert forward <= _nbytes(fields_of(call)) + _nbytes(results) < 1.2 * forward
    assert backward <= _nbytes(kept) + _nbytes(incoming) + _nbytes(gradients) < 1.2 * backward


def test_no_operation_moves_less_operator_by_operator() -> None:
    for name, subject in (*SUBJECTS.items(), ("cross_entropy", LOSS)):
        with torch.device("meta"):
            fewest = subject.fewest(placed(subject.make(ROWS, WIDTH), "meta", torch.bfloat16))
        for counted, least in zip(in_operators(subject, ROWS, WIDTH, torch.bfloat16), fewest, strict=True):
            assert counted.bytes >= least, name
