"""Choices of tokens on a GPU: against their specification, of equal scores, over many tiles, repeated."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.matrix import DEVICE
from tests.gpu.test_token_scores import LARGE, LONG
from tilewise.ops.token_choice.problem import Call
from tilewise.ops.token_choice.table import CHOOSE_TOKENS
from tilewise.ops.token_scores.problem import sample_of
from tilewise.testing import token_choice as checks
from tilewise.testing.page_selection import SPARQ, PagesCase


@pytest.mark.parametrize("case", [*SPARQ, LARGE, LONG], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_specification(case: PagesCase, dtype: torch.dtype) -> None:
    checks.check(checks.make_call(case, dtype, DEVICE), "triton")


def test_bits_repeat() -> None:
    call = checks.make_call(LARGE, torch.bfloat16, DEVICE)
    first, again = CHOOSE_TOKENS(call), CHOOSE_TOKENS(call)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def of_many(scores: torch.Tensor, width: int) -> Call:
    """A choice among scores (rows, heads, group, tokens), in pages of 64."""
    rows, heads, group, tokens = scores.shape
    pages = tokens // 64
    table = torch.randperm(rows * pages, device=DEVICE).view(rows, pages).int()
    lengths = torch.tensor([tokens, tokens - 1000, 7][:rows], dtype=torch.int32, device=DEVICE)
    hidden = torch.arange(tokens, device=DEVICE) >= lengths[:, None, None, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    total = scores.sum(2).contiguous()
    runs = scores.view(rows, heads, group, 2 * pages, 32).logsumexp(-1)
    v_mean = torch.randn(rows * pages, heads, 128, device=DEVICE).bfloat16()
    return Call(scores, total, runs, sample_of(total), table, None, lengths, v_mean, 64, width, 0, heads, 1, 1)


@pytest.mark.parametrize("kind", ["normal", "ascending", "equal", "few_values", "one_far_above"])
def test_many_tokens(kind: str) -> None:
    """Against PyTorch: more than are searched at once, and what a sample says little of."""
    n = torch.arange(65_536, device=DEVICE).float()
    x = torch.randn(3, 2, 4, len(n), device=DEVICE)
    x = {
        "normal": x, "ascending": (n / 8192).expand_as(x), "equal": torch.ones_like(x), "few_values": x.round(),
        "one_far_above": torch.where(n % 4096 == 77, 30.0 + x, x * 1e-3),
    }[kind].contiguous()  # fmt: skip
    call = of_many(x, 8192)
    tables, tokens, of_read, seen, values = CHOOSE_TOKENS(call, "triton")
    for row, length in enumerate(call.lengths.tolist()):
        read = torch.argsort(call.total[row, :, :length], dim=-1, descending=True, stable=True)[:, :8192].sort().values
        pages = call.table[row].long()
        want = pages[read // 64] * call.by_page + read % 64 + torch.arange(2, device=DEVICE)[:, None]
        assert torch.equal(tables[row, :, : read.shape[1]].long(), want)
        assert bool((tokens[row] == read.shape[1]).all())
        where = read[:, None].expand(-1, 4, -1)
        scores = call.scores[row, :, :, :length].double()
        for found, want in ((of_read, scores.gather(2, where)), (seen, scores)):
            got = found[row].double().logsumexp(-1)
            torch.testing.assert_close(got, want.logsumexp(-1), rtol=1e-5, atol=1e-5)
        counts = (length - 64 * torch.arange(len(pages), device=DEVICE)).clamp(0, 64).double()
        want = torch.einsum("n,nhd->hd", counts, call.v_mean[pages].double())
        torch.testing.assert_close(values[row].double().sum(1), want, rtol=1e-4, atol=1e-5 * length)
