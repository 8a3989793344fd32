"""The benchmark of what stands beside attention, on tiny problems on the CPU: who is compared, and how near all are."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from benchmarks import layer, quack
from benchmarks.cases import neighbours
from benchmarks.reference import relative_error
from tests.tools.running import quick
from tilewise.explain.neighbours import LOSS, SUBJECTS
from tools.families import FAMILIES

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_every_operation_is_compared_with_pytorch(tmp_path: Path) -> None:
    found = quick("neighbours", tmp_path)
    assert {record.question for record in found} == set(neighbours.QUESTIONS)
    for question in neighbours.QUESTIONS[:2]:
        named = {record.problem["operation"] for record in found if record.question == question}
        assert named == {*SUBJECTS, "cross_entropy"}
    steps = {record.problem["operation"] for record in found if record.question == neighbours.STEP}
    assert steps == {"linear_cross_entropy", "layer"}
    for record in found:
        assert record.error is not None
        assert record.error["value"] < 1e-6
        if record.problem["operation"] == "layer":
            assert record.sources == (FAMILIES["layer_cpu"].hash() if record.impl == "tilewise.eager" else None)
            assert record.impl in ("tilewise.eager", "eager.sdpa")
            continue
        ours = record.impl == "tilewise.cpu"
        assert ours or record.impl in ("eager", "eager.float32_logits")
        folder = {"swiglu": "glu", "linear_cross_entropy": "cross_entropy"}.get(
            record.problem["operation"], record.problem["operation"].split(",")[0]
        )
        folder = "norm" if folder.endswith("_norm") else folder
        assert record.sources == (FAMILIES[f"{folder}_cpu"].hash() if ours else None)


def test_a_layer_gives_the_same_eager_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    one = layer.make(layer.SMALL, 2, "cpu", torch.float32)
    want = one.reference()
    assert [tuple(x.shape) for x in want[:4]] == [(2, 24, 32)] * 4
    assert len(want) == 4 + len(one.weights)
    calls = one.contenders(compiled=True)
    assert sorted(calls) == ["compile.sdpa", "eager.sdpa", "tilewise.compile", "tilewise.eager"]
    for call in calls.values():
        errors = [relative_error(x, y) for x, y in zip(call(), want, strict=True)]
        assert max(errors) < 1e-6


def test_operations_of_a_layer_are_its_products_and_half_of_attention() -> None:
    one = layer.make(layer.SMALL, 2, "cpu", torch.float32)
    call = one.contenders(compiled=False)["eager.sdpa"]
    products = 0

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal products
            if func is torch.ops.aten.mm.default:
                products += 2 * args[0].numel() * args[1].shape[1]
            return func(*args, **(kwargs or {}))

    with Counted():
        call()
    pairs = 2 * sum(range(1, 25))
    assert one.operations == products + 3.5 * 4 * 32 * pairs


def test_quack_is_called_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layer norm wants float32 weights, and its gradients are autograd's."""

    def layernorm_fwd(x: Any, weight: Any, bias: Any, *, eps: float, return_rstd: bool, return_mean: bool) -> Any:
        assert weight.dtype == bias.dtype == torch.float32
        assert return_rstd
        assert return_mean
        o, mean, rstd = torch.native_layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)
        return o, rstd, mean

    def layernorm_bwd(x: Any, weight: Any, do: Any, rstd: Any, mean: Any) -> Any:
        weight = weight.to(x.dtype)
        return torch.ops.aten.native_layer_norm_backward(
            do, x, weight.shape, mean, rstd, weight, torch.zeros_like(weight), [True] * 3
        )

    def rmsnorm(x: Any, weight: Any, *, residual: Any = None, eps: float, prenorm: bool = False) -> Any:
        assert prenorm == (residual is not None)
        return tw.rms_norm(x, weight, residual=residual, eps=eps)

    fake = SimpleNamespace(rmsnorm=rmsnorm, softmax=tw.softmax, cross_entropy=tw.cross_entropy)
    monkeypatch.setitem(sys.modules, "quack", fake)
    norms = SimpleNamespace(layernorm_fwd=layernorm_fwd, layernorm_bwd=layernorm_bwd)
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", norms)
    found, says = quack.find("cuda")
    assert says.startswith("quack is quack-kernels")
    subjects = SUBJECTS | {"cross_entropy": LOSS}
    assert set(found) == {"rms_norm", "rms_norm, residual", "layer_norm", "softmax", "cross_entropy"}
    for name, operation in found.items():
        inputs = {
            key: x.detach().requires_grad_(x.is_floating_point()) for key, x in subjects[name].make(6, 40).items()
        }
        results = []
        for function in (operation, lambda _plain=subjects[name].plain, **x: _plain(*x.values())):
            outputs = function(**inputs)
            outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
            wanted = [x for x in inputs.values() if x.requires_grad]
            results.append((*outputs, *torch.autograd.grad(outputs, wanted, [torch.cos(x.detach()) for x in outputs])))
        torch.testing.assert_close(results[0], results[1])


def test_an_absent_quack_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quack", None)
    assert quack.find("cuda") == ({}, "quack left out: not installed")


def test_rates_count_what_must_be_read_and_written(tmp_path: Path) -> None:
    for record in quick("neighbours", tmp_path, "rms_norm", "cross_entropy"):
        tensors = {"rms_norm": (2, 3), "rms_norm, residual": (4, 4), "cross_entropy": (1, 2)}
        backward = record.question == "neighbours_backward"
        rows, width = (int(n) for n in record.problem["shape"].split(" × "))
        nbytes = tensors[record.problem["operation"]][backward] * rows * width * 4
        assert record.p50_ms is not None
        assert record.gbps == pytest.approx(nbytes / record.p50_ms / 1e6, rel=1e-3)
