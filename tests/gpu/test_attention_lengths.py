"""Lengths that fill no tile, every odd one up to 1025 and those on either side of a tile's end; more tiles than a GPU
has multiprocessors.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.matrix import DEVICE
from tilewise.testing import cases as build
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.properties import Setting

ODD = tuple(range(1, 1026, 2))
ENDS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 383, 385, 511, 513, 1023, 1025)


@pytest.mark.xdist_group("every_odd_length")  # one after another: 8 GiB each
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_every_odd_length(impl: str, head_dim: int) -> None:
    """As sequences of one packed call."""
    lengths = tuple((n, n) for n in ODD)
    case = Case(
        "odd_lengths", packed=lengths, heads_q=2, heads_kv=1, head_dim=head_dim, head_dim_v=head_dim, mask=build.causal
    )
    properties.equals_reference(Setting(impl, torch.bfloat16, DEVICE), case)
    properties.gradients_equal_reference(Setting(impl, torch.bfloat16, DEVICE), case)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_lengths_at_the_ends_of_tiles(impl: str, head_dim: int) -> None:
    """Queries of one length, keys of the next."""
    for rows, keys in zip(ENDS, (*ENDS[1:], 100), strict=True):
        case = Case(f"length_{rows}_{keys}", 1, rows, keys, 2, 1, head_dim, head_dim)
        properties.gradients_equal_reference(Setting(impl, torch.bfloat16, DEVICE), case)


SEVERAL = {
    "plain": {},
    "causal": {"mask": build.causal},
    "longer": {"mask": build.causal, "seqlen_q": 600, "seqlen_k": 600},  # too long for a kernel of its own for dQ
    "window": {"mask": build.window(100, 30)},
    "document": {"mask": build.document_window},
    "alibi": {"mask": build.causal, "score": build.alibi},
    "packed": {"mask": build.window(100), "packed": tuple((n, n) for n in (330, 1, 0, 300, 520, 64))},
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("impl", ["triton", "hopper"])
@pytest.mark.parametrize("name", SEVERAL)
def test_programs_that_take_several_tiles(name: str, impl: str, head_dim: int) -> None:
    """Three tiles of 128 keys or more for each of 72 pairs of batch and head."""
    lengths = {"seqlen_q": 330, "seqlen_k": 330}
    heads = {"heads_q": 48, "heads_kv": 24, "head_dim": head_dim, "head_dim_v": head_dim}
    case = Case(f"several_{name}", 3, **{**lengths, **heads, **SEVERAL[name]})
    properties.gradients_equal_reference(Setting(impl, torch.bfloat16, DEVICE), case)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_short_sequences(head_dim: int) -> None:
    """Tiles mostly empty, for which the Hopper backward keeps no sums of dQ."""
    lengths = tuple((n % 7, n % 7) for n in range(60))
    case = Case("short", packed=lengths, heads_q=4, heads_kv=2, head_dim=head_dim, head_dim_v=head_dim)
    properties.gradients_equal_reference(Setting("hopper", torch.bfloat16, DEVICE), case)
