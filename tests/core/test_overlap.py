"""Two tensors that are written to share no memory: told by pointers, sizes and strides, against sets of addresses."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.core.overlap import check_apart


def share(x: torch.Tensor, y: torch.Tensor) -> bool:
    try:
        check_apart("y", y, "x", x)
    except InputError:
        return True
    return False


def addresses(x: torch.Tensor) -> set[int]:
    places = itertools.product(*(range(n) for n in x.shape))
    return {x.data_ptr() + 4 * sum(a * s for a, s in zip(place, x.stride(), strict=True)) for place in places}


@given(
    cut=st.tuples(*[st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 2)) for _ in range(3)]),
    other=st.tuples(*[st.tuples(st.integers(0, 3), st.integers(1, 4)) for _ in range(3)]),
    order=st.permutations(range(3)),
)
def test_parts_of_one_tensor(cut: tuple, other: tuple, order: list[int]) -> None:
    """Equal steps, any place and any size: exactly those pairs that share an address."""
    whole = torch.zeros(6, 5, 4).permute(order)
    x = whole[tuple(slice(first, first + n, step) for first, n, step in cut)]
    y = whole[tuple(slice(first, first + n, step) for (first, n), (_, _, step) in zip(other, cut, strict=True))]
    if x.stride() == y.stride():
        assert share(x, y) == bool(addresses(x) & addresses(y))


def test_pages_side_by_side() -> None:
    pages = torch.zeros(5, 2, 4, 2, 8)
    assert not share(pages[:, 0], pages[:, 1])
    assert not share(pages[..., :4], pages[..., 4:])
    assert not share(pages[:2], pages[2:])
    assert share(pages[:3], pages[2:])
    assert share(pages, pages)
    assert share(pages, pages[..., :4])
    assert not share(pages, pages.clone())
    assert not share(pages[:0], pages)
    assert not share(*(torch.zeros(2, device="meta"),) * 2)


@pytest.mark.parametrize("shift", [0, 1])
def test_keys_and_values_have_pages_of_their_own(shift: int) -> None:
    k, pages = torch.ones(3, 2, 8), torch.zeros(5, 4, 2, 8)
    slots = torch.arange(3)
    with pytest.raises(InputError, match=r"^v_pages: got memory of k_pages"):
        tw.kv_write(k, 2 * k, pages[: 4 - shift], pages[shift:4], slots)
    assert not pages.any()
    both = torch.zeros(5, 2, 4, 2, 8)
    tw.kv_write(k, 2 * k, both[:, 0], both[:, 1], slots)
    assert torch.equal(both[0, :, :3], torch.stack([k, 2 * k]))


def test_nor_do_others_that_write() -> None:
    x, angles = torch.ones(3, 2, 8), torch.ones(3, 4)
    with pytest.raises(InputError, match=r"^k: got memory of q"):
        tw.rope(x, x, rope=tw.Rope(angles, angles, torch.arange(3)), inplace=True)
    assert torch.equal(x, torch.ones(3, 2, 8))
    from tilewise.adapters.flash_attn import flash_attn_with_kvcache

    cache, new = torch.zeros(1, 4, 2, 8), torch.ones(1, 1, 2, 8)
    with pytest.raises(InputError, match=r"^v_cache: got memory of k_cache"):
        flash_attn_with_kvcache(new, cache, cache, new, 2 * new, cache_seqlens=0)
    assert not cache.any()
