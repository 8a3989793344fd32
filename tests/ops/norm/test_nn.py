"""Modules of `tilewise.nn` stand in for those of torch.nn."""

from __future__ import annotations

import inspect

import pytest
import torch

from tilewise import nn
from tilewise.core.errors import InputError


@pytest.mark.parametrize("name", nn.__all__)
def test_constructors_are_those_of_torch(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (nn, torch.nn))
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"elementwise_affine": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("name", nn.__all__)
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


@pytest.mark.parametrize("name", nn.__all__)
def test_parameters_take_gradients(name: str) -> None:
    module = getattr(nn, name)(8)
    module(torch.randn(3, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("name", nn.__all__)
def test_more_dimensions_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"normalized_shape: got \[2, 8\]"):
        getattr(nn, name)((2, 8))
