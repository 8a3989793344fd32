"""What stands for tokens that are not read on the CPU: against its specification, and where nothing is added."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewise.ops.merge import merge
from tilewise.ops.token_rest.table import ADD_REST
from tilewise.testing import token_rest as checks
from tilewise.testing.page_selection import BY_NAME, SPARQ, PagesCase


@pytest.mark.parametrize("case", SPARQ, ids=repr)
def test_equals_the_specification(case: PagesCase) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        checks.check(checks.make_call(case, dtype), "cpu")


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["sparq", "sparq_drafts"])
def test_is_a_second_state_that_is_merged(name: str, impl: str) -> None:
    """The mean of all values, which weighs what is not read."""
    call = checks.make_call(BY_NAME[name], torch.float64)
    seen, read = (x.double().logsumexp(-1).flatten(1) for x in (call.seen, call.read))
    rest = torch.where((seen > read) & (call.lengths > call.width)[:, None], torch.expm1(seen - read).log(), -torch.inf)
    total = call.values.double().sum(2) + (0.0 if call.last is None else call.last)
    mean = (total / call.lengths.clamp(min=1)[:, None, None]).repeat_interleave(call.group, 1)
    states = ((call.o, call.lse), (mean, call.lse + rest))
    o, lse = merge(*((o[:, None].contiguous(), lse[..., None]) for o, lse in states))
    found = ADD_REST(call, impl)
    torch.testing.assert_close(found[0], o[:, 0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1], lse[..., 0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_nothing_is_added(impl: str) -> None:
    """Where all is read, where attention saw nothing, where logarithms are no numbers: values may be anything."""
    call = checks.make_call(BY_NAME["sparq"], torch.float32)
    call.values.fill_(torch.nan)
    call.lse[0, 0], call.o[0, 0] = -torch.inf, 0.0
    call.seen[0, 0, 1], call.read[3] = torch.nan, torch.inf
    o, lse = ADD_REST(call, impl)
    for row, head in ((0, 0), (0, 1), (1, 0), (2, 0), (3, 3)):
        assert torch.equal(o[row, head], call.o[row, head])
        assert torch.equal(lse[row, head], call.lse[row, head])
    assert bool(o[0, 2:].isnan().any())


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_without_rows(impl: str) -> None:
    call = checks.make_call(BY_NAME["sparq"], torch.float32)
    rows = {name: getattr(call, name)[:0] for name in ("o", "lse", "read", "seen", "values", "lengths")}
    o, lse = ADD_REST(replace(call, **rows), impl)
    assert o.shape == (0, *call.o.shape[1:])
    assert lse.shape == (0, call.lse.shape[1])
