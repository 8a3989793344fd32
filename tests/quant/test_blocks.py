"""Which keys of a sequence their centre is the mean of."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise.quant.blocks import keys_of_mean
from tilewise.quant.schemes import SAMPLE, SAMPLED_FROM, SAMPLED_OF


@pytest.mark.parametrize("length", [0, 1, 129, SAMPLED_FROM - 1])
def test_of_few_keys_all(length: int) -> None:
    assert keys_of_mean(torch.arange(length)).tolist() == list(range(length))


@pytest.mark.parametrize("length", [SAMPLED_FROM, SAMPLED_FROM + 1, SAMPLED_FROM + 330, 3 * SAMPLED_FROM])
def test_of_many_an_eighth(length: int) -> None:
    """64 of each 512, as often at each of the eight offsets, and not the first keys."""
    rows = keys_of_mean(torch.arange(length))
    assert rows.unique().tolist() == rows.tolist()
    assert rows.min() >= SAMPLE
    assert rows.max() < length
    whole = length // SAMPLED_OF
    offsets = [int(first) % SAMPLED_OF for first in rows[: whole * SAMPLE : SAMPLE]]
    counts = [offsets.count(offset) for offset in range(0, SAMPLED_OF, SAMPLE)]
    assert max(counts) - min(counts) <= 1
    assert [int(row) // SAMPLED_OF for row in rows[: whole * SAMPLE : SAMPLE]] == list(range(whole))


@pytest.mark.parametrize("length", [SAMPLED_FROM, 2 * SAMPLED_FROM, 4 * SAMPLED_FROM])
@pytest.mark.parametrize("period", [0, 64, 80, 128, 4096])
def test_it_is_as_good_a_centre(period: int, length: int) -> None:
    """Channels far from 0, also by rows of an image: scales are those of the exact mean."""
    generator = torch.Generator().manual_seed(0)
    dim = 32
    k = torch.randn(1, length, 1, dim, generator=generator) + 8.0 * torch.randn(dim, generator=generator)
    if period:
        k = k + 3.0 * torch.sin(torch.arange(length) * (2 * torch.pi / period))[None, :, None, None]
    q, v = torch.randn(1, 64, 1, dim, generator=generator), torch.randn(1, length, 1, dim, generator=generator)
    sampled = tw.quantize_qkv(q, k, v, scheme=tw.Sage2())
    assert sampled.k_mean is not None
    exact = tw.quantize_qkv(q, k - k.mean(1, keepdim=True), v, scheme=tw.Sage(smooth=()))
    assert float(sampled.k_scale.mean()) <= 1.02 * float(exact.k_scale.mean())
