"""Dropout bits: Philox4x32-10 against the published vectors, through an implementation on Python integers."""

from __future__ import annotations

import pytest
import torch

from tilewise.core.philox import keep_mask, philox, threshold

WORD = 0xFFFFFFFF


def by_hand(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 as its authors write it (Random123, philox.h)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second & WORD, (first >> 32) ^ c[3] ^ k[1], first & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


# Known answers of Random123 (kat_vectors, philox4x32 10).
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_the_implementation_by_hand_gives_the_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert tuple(by_hand(counter, key)) == words


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 7, 2**62 - 1])
@pytest.mark.parametrize("counter", [(0, 0, 0), (1, 2, 3), (WORD, 5, 1 << 20), (2**31, 2**31 - 1, WORD)])
def test_words_equal_the_implementation_by_hand(seed: int, counter: tuple[int, int, int]) -> None:
    words = philox(seed, *(torch.tensor(c) for c in counter))
    assert [int(w) for w in words] == by_hand((*counter, 0), (seed & WORD, seed >> 32))


def test_negative_positions_count_as_their_32_bit_patterns() -> None:
    """Queries before the first key have negative positions; the kernels see them as unsigned."""
    words = philox(9, torch.tensor(4), torch.tensor(-3), torch.tensor(1))
    assert [int(w) for w in words] == by_hand((4, -3 & WORD, 1, 0), (9, 0))


def test_a_score_has_one_fate_whatever_the_tile() -> None:
    row, i = torch.arange(3)[:, None, None], torch.arange(-2, 5)[:, None]
    whole = keep_mask(7, 0.4, row, i, torch.arange(23))
    assert whole.shape == (3, 7, 23)
    for start, stop in ((0, 5), (3, 4), (6, 23), (21, 23)):
        assert torch.equal(keep_mask(7, 0.4, row, i, torch.arange(start, stop)), whole[..., start:stop])
    for at in ((0, -2, 0), (1, 0, 6), (2, 4, 22)):
        word = by_hand((at[2] // 4, at[1] & WORD, at[0], 0), (7, 0))[at[2] % 4]
        assert bool(whole[at[0], at[1] + 2, at[2]]) == (word >= 0.4 * 2**32)


def test_share_and_independence() -> None:
    keep = keep_mask(3, 0.25, torch.arange(8)[:, None, None], torch.arange(128)[:, None], torch.arange(128)).double()
    spread = (0.25 * 0.75 / keep.numel()) ** 0.5
    assert abs(float(keep.mean()) - 0.75) < 5 * spread
    for axis in range(3):
        centred = keep - 0.75
        product = (centred.narrow(axis, 1, keep.shape[axis] - 1) * centred.narrow(axis, 0, keep.shape[axis] - 1)).mean()
        assert abs(float(product)) < 5 * 0.25 * 0.75 / keep.numel() ** 0.5


def test_threshold() -> None:
    assert threshold(0.0) == 0
    assert threshold(0.5) == 2**31
    assert threshold(0.9999999999) == 0xFFFFFF00  # the largest float32 below 2**32


def test_no_keys() -> None:
    assert keep_mask(1, 0.5, torch.zeros(1, 1, dtype=torch.long), torch.arange(4)[:, None], torch.arange(0)).shape == (
        4,
        0,
    )
