"""What must hold of implementations that serve many requests: plans that calls share, and requests among others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import tilewise as tw
from tilewise.testing.case import Case
from tilewise.testing.inputs import make_inputs
from tilewise.testing.paging import paged
from tilewise.testing.properties import Setting, same_bits


def among_others(
    setting: Setting, case: Case, others: Sequence[tuple[int, int]], place: int, page_size: int | None = 16,
    **arguments: Any,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The results of the only request of a packed case, in pages or without `page_size` in rows, in a batch with others
    of (queries, keys), of which `place` stand before it. Formulas that look at the request see another one then.
    """
    assert case.packed is not None
    (mine,) = case.packed
    inputs = make_inputs(case, setting.dtype, setting.device)
    lengths = [*others[:place], mine, *others[place:]]
    batch = make_inputs(case.with_(packed=tuple(lengths)), setting.dtype, setting.device)
    starts = [sum(pair[axis] for pair in lengths[:place]) for axis in (0, 1)]
    k, v = batch.k, batch.v
    with torch.no_grad():
        for x, own, start in ((batch.q, inputs.q, starts[0]), (k, inputs.k, starts[1]), (v, inputs.v, starts[1])):
            x[start : start + own.shape[0]] = own
        arguments = batch.arguments() | arguments
        if inputs.sink is not None:
            arguments["sink"] = inputs.sink
        if page_size is not None:
            k, v, arguments["layout"] = paged(batch, page_size, seed=place)
        o, lse = tw.attention_with_lse(batch.q, k, v, impl=setting.impl, **arguments)
    rows = slice(starts[0], starts[0] + mine[0])
    return {"o": o[rows], "lse": lse[:, rows]}


def a_run_is_a_call(setting: Setting, case: Case, page_size: int | None = 16, *, named: bool = True) -> None:
    """Each of several runs of one plan gives the bits of a call: with the keys in pages, or, without `page_size`, where
    the case has them; without `named`, by the implementation that a call finds.
    """
    inputs = make_inputs(case, setting.dtype, setting.device)
    k, v, arguments = inputs.k, inputs.v, inputs.arguments() | {"impl": setting.impl if named else None}
    del arguments["dropout"]
    if page_size is not None:
        k, v, arguments["layout"] = paged(inputs, page_size)
    with torch.no_grad():
        plan = tw.plan(torch.zeros_like(inputs.q), k, v, **arguments)
        for sign in (1, -1):
            q = sign * inputs.q
            got = plan.run_with_lse(q, k, v, sink=arguments.get("sink"))
            want = tw.attention_with_lse(q, k, v, **arguments)
            same_bits(dict(zip(("o", "lse"), got, strict=True)), dict(zip(("o", "lse"), want, strict=True)), "a call")
