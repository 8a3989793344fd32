"""Modules of `tilewise.nn` stand in for those of torch.nn."""

from __future__ import annotations

import inspect

import pytest
import torch

from tilewise import nn
from tilewise.core.errors import InputError
from tilewise.testing import operators

NORMS = ("LayerNorm", "RMSNorm")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("name", nn.__all__)
def test_constructors_are_those_of_torch(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (nn, torch.nn))
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"elementwise_affine": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_equal_those_of_torch(name: str, options: dict, dtype: torch.dtype) -> None:
    if name == "RMSNorm" and "bias" in options:
        return
    theirs = getattr(torch.nn, name)(24, **options, dtype=dtype)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = getattr(nn, name)([24], **options, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == repr(theirs)
    x = (torch.randn(5, 24) * (1e-2 if "eps" in options else 1.0)).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x))
    o, s = ours(x, residual=x)
    torch.testing.assert_close(o, theirs(x + x))
    assert torch.equal(s, x + x)


@pytest.mark.parametrize("name", NORMS)
def test_parameters_take_gradients(name: str) -> None:
    module = getattr(nn, name)(8)
    module(torch.randn(3, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("name", NORMS)
def test_more_dimensions_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"normalized_shape: got \[2, 8\]"):
        getattr(nn, name)((2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_softmax_equals_that_of_torch(name: str, dim: int, dtype: torch.dtype) -> None:
    ours, theirs = (getattr(module, name)(dim) for module in (nn, torch.nn))
    assert repr(ours) == repr(theirs)
    operators.check(ours, theirs, {"input": torch.randn(5, 7, 9).to(dtype).requires_grad_()})


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_softmax_needs_a_dimension(name: str) -> None:
    with pytest.raises(InputError, match="dim: got None"):
        getattr(nn, name)()


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": 3}],
    ids=str,
)
@pytest.mark.parametrize("shape", [(11,), (6, 11), (3, 11, 5), (2, 11, 3, 4)], ids=str)
def test_cross_entropy_equals_that_of_torch(shape: tuple[int, ...], options: dict) -> None:
    ours, theirs = (module.CrossEntropyLoss(**options) for module in (nn, torch.nn))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    target = torch.randint(0, 11, shape[:1] + shape[2:] if len(shape) > 1 else ())
    target.view(-1)[:1] = 5  # one at least is not ignored
    operators.check(ours, theirs, {"input": torch.randn(shape).requires_grad_(), "target": target})


def test_cross_entropy_of_16_bits_is_float32() -> None:
    x, target = torch.randn(6, 11, dtype=torch.bfloat16), torch.randint(0, 11, (6,))
    loss = nn.CrossEntropyLoss()(x, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.nn.CrossEntropyLoss()(x.float(), target))


@pytest.mark.parametrize("options", [{"weight": torch.ones(3)}, {"size_average": True}, {"reduce": False}], ids=str)
def test_what_cross_entropy_does_not_take(options: dict) -> None:
    with pytest.raises(InputError, match=f"{next(iter(options))}: got"):
        nn.CrossEntropyLoss(**options)


def test_probabilities_as_targets_are_refused() -> None:
    with pytest.raises(InputError, match=r"target: got torch\.float32"):
        nn.CrossEntropyLoss()(torch.randn(2, 3), torch.full((2, 3), 1 / 3))
