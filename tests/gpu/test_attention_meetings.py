"""Programs that wait for each other, so that L2 is read once for several (`gluon_sm90_meetings`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.ops.attention import gluon_attention, gluon_codes, triton_attention
from tilewise.ops.triton_launch import Plans
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.properties import Setting

LONG = 4170  # keys: 33 tiles of 128, the last of them cut


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=str)
def test_long_rows_equal_the_reference(head_dim: int, heads: tuple[int, int]) -> None:
    case = Case("met", 1, LONG, LONG, *heads, head_dim, head_dim)
    properties.gradients_equal_reference(Setting("hopper", torch.bfloat16, DEVICE), case)


@pytest.mark.parametrize("programs", [132, 400], ids=["all_at_once", "some_not_begun"])
@pytest.mark.parametrize("quantize", [None, tw.Sage("fp8")], ids=["exact", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_meetings_change_no_bit(head_dim: int, quantize: Any, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a GPU cannot run all programs at a time, so that some wait in vain."""
    torch.manual_seed(0)
    rows = 8200 if quantize is not None else LONG  # over codes programs meet from 64 tiles on
    q, k, v, do = (
        torch.randn(2, rows, heads, head_dim, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for heads in (12, 4, 4, 12)
    )

    def found() -> tuple[torch.Tensor, ...]:
        o = tw.attention(q, k, v, quantize=quantize, impl="hopper" if quantize is None else None)
        if quantize is not None:
            return (o,)
        _dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)  # dq is added up in any order
        return o, dk, dv

    def anew() -> None:
        for module in (gluon_attention, gluon_codes, triton_attention):
            monkeypatch.setattr(module, "_PLANS", Plans())

    with monkeypatch.context() as patch:
        for module in (gluon_attention, gluon_codes):
            patch.setattr(module, "meets", lambda *_: None)
        anew()
        expected = found()
    for module in (gluon_attention, gluon_codes):
        monkeypatch.setattr(module, "multiprocessors", lambda device: programs)
    anew()
    for _ in range(3):
        for x, y in zip(found(), expected, strict=True):
            assert torch.equal(x, y)
