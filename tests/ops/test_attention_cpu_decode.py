"""Decoding over pages on a CPU: all requests in one call of PyTorch's kernel, and what that must not change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.ops.attention import cpu_decode

LENGTHS = {"one": [40], "equal": [33, 33, 33], "ragged": [20, 37, 29, 40], "short": [1, 3, 2], "far": [1, 40, 2]}
BIAS = torch.linspace(-1.0, 1.0, 64)
MASKS = {
    "none": None,
    "causal": tw.causal,
    "window": tw.window(9),
    "captured": tw.mask(lambda b, h, i, j: (BIAS[j.clamp(max=63)] > 0.2) | (j == i) | (h == b)),
}


def call(lengths: list[int], packed: bool, page_size: int = 4, **changes: Any) -> dict[str, Any]:
    """Arguments of decoding; entries behind a request's pages, and slots behind its last key, hold what they may."""
    generator = torch.Generator().manual_seed(sum(lengths))
    count, width = len(lengths), -(-max(lengths) // page_size) + 1
    pages = [torch.randn(count * width, page_size, 2, 16, generator=generator) for _ in range(2)]
    table = torch.randperm(count * width, generator=generator).view(count, width).int()
    for row, length in enumerate(lengths):
        used = -(-length // page_size)
        for x in pages:
            x[table[row, used - 1], (length - 1) % page_size + 1 :] = torch.nan
            x[table[row, used:].long()] = torch.nan
        table[row, used:] = 2**30
    q = torch.randn(count, *([] if packed else [1]), 6, 16, generator=generator)
    cu = torch.arange(count + 1, dtype=torch.int32) if packed else None
    layout = tw.Paged(table, torch.tensor(lengths, dtype=torch.int32), cu)
    return {"q": q, "k": pages[0], "v": pages[1], "layout": layout} | changes


def batched(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[torch.Tensor, ...], list[list[int]]]:
    """((o, lse), which requests the kernel left)."""
    left: list[list[int]] = []
    forward = cpu_decode.forward

    def watched(*given: Any) -> list[int]:
        found = forward(*given)
        left.append(found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(cpu_decode, "forward", watched)
        return tw.attention_with_lse(**arguments), left


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sink", [False, True])
def test_equals_the_reference(
    mask: str, lengths: str, packed: bool, sink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = torch.linspace(-1.0, 2.0, 6) if sink else None
    arguments = call(LENGTHS[lengths], packed, mask=MASKS[mask], sink=sinks)
    found, left = batched(arguments, monkeypatch)
    assert left == [[]]
    want = tw.attention_with_lse(**arguments, impl="reference")
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_request_that_meets_no_number_is_alone_with_it(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = call(LENGTHS["ragged"], True, mask=tw.causal)
    clean, _ = batched(arguments, monkeypatch)
    table = arguments["layout"].block_table
    arguments["k"][table[2, 3], 1, 0, 3] = value
    found, left = batched(arguments, monkeypatch)
    assert left == [[2]]
    want = tw.attention_with_lse(**arguments, impl="reference")
    for one, other, before in zip(found, want, clean, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5, atol=1e-5, equal_nan=True)
        others = [0, 1, 3]
        assert torch.equal(
            one[others] if one.ndim == 3 else one[:, others], before[others] if one.ndim == 3 else before[:, others]
        )


def test_a_row_that_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = call(LENGTHS["equal"], True, mask=tw.mask(lambda b, h, i, j: (b != 1) | (h > 2)))
    found, left = batched(arguments, monkeypatch)
    assert left == [[1]]
    want = tw.attention_with_lse(**arguments, impl="reference")
    assert bool((found[1][:3, 1] == -math.inf).all())
    assert not found[0][1, :3].any()
    torch.testing.assert_close(found[0], want[0].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_prompts_and_empty_requests_beside(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, counts = [20, 37, 5, 40, 2], [1, 9, 0, 1, 2]
    arguments = call(lengths, True, mask=MASKS[mask])
    table, seqlens = arguments["layout"].block_table, torch.tensor([*lengths[:4], 2], dtype=torch.int32)
    cu = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    arguments["q"] = torch.randn(sum(counts), 6, 16, generator=torch.Generator().manual_seed(3))
    arguments["layout"] = tw.Paged(table, seqlens, cu)
    found, left = batched(arguments, monkeypatch)
    assert left == [[1, 4]]
    want = tw.attention_with_lse(**arguments, impl="reference")
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5, atol=1e-5)


def test_requests_of_similar_length_go_together() -> None:
    lengths = [100, 3, 210, 90, 8, 199, 1000]
    groups = list(cpu_decode._alike(list(range(7)), lengths))
    assert groups == [[1, 4], [3, 0], [5, 2], [6]]


@pytest.mark.parametrize(
    "changes",
    [
        {"score": tw.softcap(5.0)},
        {"batch_invariant": True},
        {"dropout": 0.5, "seed": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_calls_go_other_ways(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert batched(call(LENGTHS["equal"], True, mask=tw.causal, **changes), monkeypatch)[1] == []


def test_runs_of_a_plan_read_what_layout_and_mask_hold() -> None:
    hidden = torch.zeros(64, dtype=torch.bool)
    arguments = call(LENGTHS["ragged"], True, mask=tw.mask(lambda b, h, i, j: ~hidden[j.clamp(max=63)] | (j == i)))
    tensors, layout = (arguments["q"], arguments["k"], arguments["v"]), arguments["layout"]
    planned = tw.plan(*tensors, mask=arguments["mask"], layout=layout)

    def check() -> None:
        assert torch.equal(planned.run(*tensors), tw.attention(**arguments))

    check()
    before = planned.run(*tensors)
    changes: list[tuple[torch.Tensor, torch.Tensor]] = [
        (layout.seqlens_k, layout.seqlens_k - 3),
        (layout.block_table, layout.block_table.roll(1, 0)),
        (hidden, torch.arange(64) % 3 == 0),
    ]
    for tensor, value in changes:
        if tensor is layout.block_table:
            layout.seqlens_k.fill_(20)  # that many keys are in each row's pages
        tensor.copy_(value)
        check()
        assert not torch.equal(planned.run(*tensors), before)
    layout.seqlens_k[2] = 1000
    with pytest.raises(tw.errors.InputError, match="seqlens_k: got 1000 in request 2"):
        planned.run(*tensors)
