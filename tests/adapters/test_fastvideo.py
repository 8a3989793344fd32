"""FastVideo's sliding tile attention against its rules walked tile by tile, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.adapters.dense import assert_close, dense, leaves
from tilewise.adapters import fastvideo
from tilewise.adapters.fastvideo import sliding_tile_attention
from tilewise.core.errors import InputError

TILE = (2, 2, 3)
VIDEO = (4, 6, 9)  # 2 x 3 x 3 tiles of 12 tokens
CUT = (5, 6, 8)  # 3 x 3 x 3 tiles, those at the border cut


def visible(canvas: tuple[int, ...], windows: Any, text: int, valid: int) -> torch.Tensor:
    """bool (heads, seqlen, seqlen): windows of FastVideo's kernels, and text."""
    grid = [-(-size // extent) for size, extent in zip(canvas, TILE, strict=True)]
    tiles = list(itertools.product(*map(range, grid)))
    places = itertools.product(*map(range, canvas))
    owner = sorted(tiles.index(tuple(x // t for x, t in zip(place, TILE, strict=True))) for place in places)
    heads = []
    for window in windows:
        near = torch.ones(len(tiles), len(tiles), dtype=torch.bool)
        for query, key in itertools.product(range(len(tiles)), repeat=2):
            for own, other, width, count in zip(tiles[query], tiles[key], window, grid, strict=True):
                middle = max(width // 2, min(own, count - 1 - width // 2))
                near[query, key] &= middle - width // 2 <= other <= middle + width // 2
        table = torch.ones(len(owner) + text, len(owner) + text, dtype=torch.bool)
        table[: len(owner), : len(owner)] = near[owner][:, owner]
        table[:, len(owner) :] = torch.arange(text) < valid
        heads.append(table)
    return torch.stack(heads)


@pytest.mark.parametrize(("text", "valid"), [(0, 0), (7, 7), (7, 3), (7, 0)])
@pytest.mark.parametrize(
    ("canvas", "windows"),
    [
        (VIDEO, [(1, 1, 1), (1, 3, 1), (2, 3, 1), (1, 1, 3)]),  # 2 of 2: all
        (VIDEO, [(3, 2, 5), (1, 1, 4), (1, 2, 1), (2, 1, 2)]),  # 2 of 3 sees 3 tiles, 4 and 5 of 3 all
        (CUT, [(3, 1, 1), (1, 1, 3), (1, 3, 1), (2, 2, 2)]),
    ],
    ids=["odd", "even", "cut"],
)
def test_a_call_is_attention_under_its_windows(canvas: tuple[int, ...], windows: Any, text: int, valid: int) -> None:
    tokens = math.prod(canvas) + text
    q, k, v = leaves((2, 4, tokens, 16), (2, 2, tokens, 16), (2, 2, tokens, 8))
    seen = visible(canvas, windows, text, valid)
    arguments = (windows, valid, bool(text), "x".join(map(str, canvas)))
    ours = sliding_tile_attention(q, k, v, *arguments, tile_size=TILE)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want, plain = dense(*exact, seen)[0], dense(q, k, v, seen)[0]
    assert_close(ours, want, plain)
    do = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    truth = torch.autograd.grad(want, exact, do.double())
    for name, x, y, z in zip(
        "qkv", torch.autograd.grad(ours, (q, k, v), do), truth, torch.autograd.grad(plain, (q, k, v), do), strict=True
    ):
        assert_close(x, y, z, f"d{name}")


def test_a_text_length_for_each_batch_element() -> None:
    tokens = math.prod(VIDEO) + 7
    q, k, v = (x.detach() for x in leaves(*[(3, 2, tokens, 8)] * 3))
    windows, shape = [(1, 3, 1), (2, 1, 1)], "4x6x9"
    lengths = torch.tensor([0, 7, 3])
    each = sliding_tile_attention(q, k, v, windows, lengths, seq_shape=shape, tile_size=TILE)
    for b, length in enumerate(lengths.tolist()):
        one = [x[b : b + 1] for x in (q, k, v)]
        alone = sliding_tile_attention(*one, windows, length, seq_shape=shape, tile_size=TILE)
        torch.testing.assert_close(each[b : b + 1], alone)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32], ids=str)
def test_lengths_of_few_bits_do_not_overflow(dtype: torch.dtype) -> None:
    """216 tokens of video and 77 of text: more than 8 bits hold."""
    tokens = math.prod(VIDEO) + 77
    q, k, v = (x.detach() for x in leaves(*[(2, 1, tokens, 8)] * 3))
    arguments: dict[str, Any] = {"seq_shape": "4x6x9", "tile_size": TILE}
    lengths = torch.tensor([50, 77])
    want = sliding_tile_attention(q, k, v, [(1, 3, 1)], lengths, **arguments)
    assert torch.equal(sliding_tile_attention(q, k, v, [(1, 3, 1)], lengths.to(dtype), **arguments), want)


def test_a_video_of_more_tokens_than_16_bits_count() -> None:
    q = torch.zeros(1, 1, 182 * 182 + 5, 1)
    v = torch.arange(q.shape[2], dtype=torch.float32).view(1, 1, -1, 1)
    arguments: dict[str, Any] = {"seq_shape": "1x182x182", "tile_size": (1, 91, 91)}
    want = sliding_tile_attention(q, q, v, [(1, 1, 1)], torch.tensor([3]), **arguments)
    found = sliding_tile_attention(q, q, v, [(1, 1, 1)], torch.tensor([3], dtype=torch.int16), **arguments)
    assert torch.equal(found, want)


def test_padding_is_never_read() -> None:
    tokens = math.prod(VIDEO) + 7
    q, k, v = (x.detach() for x in leaves(*[(1, 1, tokens, 8)] * 3))
    arguments: dict[str, Any] = {"seq_shape": "4x6x9", "tile_size": TILE}
    before = sliding_tile_attention(q, k, v, [(1, 1, 1)], 3, **arguments)
    k[:, :, -4:], v[:, :, -4:] = 1e4, -1e4
    assert torch.equal(sliding_tile_attention(q, k, v, [(1, 1, 1)], 3, **arguments), before)


def test_tokens_stand_as_fastvideo_tiles_them() -> None:
    """(n_t ts_t) (n_h ts_h) (n_w ts_w) -> (n_t n_h n_w) (ts_t ts_h ts_w), tiles of 6 x 8 x 8."""
    x = torch.arange(12 * 16 * 8)
    theirs = x.reshape(2, 6, 2, 8, 1, 8).permute(0, 2, 4, 1, 3, 5).flatten()
    assert torch.equal(tw.TokenOrder((12, 16, 8), (6, 8, 8)).apply(x, 0), theirs)


def test_the_mask_of_a_call_is_made_once() -> None:
    """Layers and steps repeat a call."""
    q = torch.zeros(1, 2, math.prod(CUT) + 4, 8)
    arguments: dict[str, Any] = {"seq_shape": "5x6x8", "tile_size": TILE}
    sliding_tile_attention(q, q, q, [(1, 1, 1), (1, 3, 1)], 2, **arguments)
    misses = fastvideo._mask.cache_info().misses
    sliding_tile_attention(q, q, q, [[1, 1, 1], [1, 3, 1]], 2, **arguments)
    assert fastvideo._mask.cache_info().misses == misses


Q = torch.zeros(2, 2, math.prod(VIDEO) + 7, 8)
CALL: dict[str, Any] = {"seq_shape": "4x6x9", "tile_size": TILE}
TWO = [(1, 1, 1)] * 2
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "windows": (
        lambda: sliding_tile_attention(Q, Q, Q, TWO[:1], 7, **CALL),
        "window_size: got [(1, 1, 1)]; expected",
    ),
    "window": (lambda: sliding_tile_attention(Q, Q, Q, [(1, 1)] * 2, 7, **CALL), "window_size: got [(1, 1), (1, 1)]"),
    "zero": (
        lambda: sliding_tile_attention(Q, Q, Q, [(1, 0, 1)] * 2, 7, **CALL),
        "window_size: got [(1, 0, 1), (1",
    ),
    "number": (lambda: sliding_tile_attention(Q, Q, Q, 3, 7, **CALL), "window_size: got 3"),  # type: ignore[arg-type]
    "text": (lambda: sliding_tile_attention(Q, Q, Q, TWO, 8, **CALL), "text_length: got 8; expected an integer from 0"),
    "texts": (lambda: sliding_tile_attention(Q, Q, Q, TWO, torch.tensor([7]), **CALL), "text_length: got torch.int64"),
    "texts_bool": (
        lambda: sliding_tile_attention(Q, Q, Q, TWO, torch.tensor([True, True]), **CALL),
        "text_length: got torch.bool (2,); expected an integer tensor (2,)",
    ),
    "texts_negative": (
        lambda: sliding_tile_attention(Q, Q, Q, TWO, torch.tensor([-1, 7]), **CALL),
        "text_length: got numbers from -1 to 7; expected 0 to 7",
    ),
    "texts_long": (
        lambda: sliding_tile_attention(Q, Q, Q, TWO, torch.tensor([0, 8], dtype=torch.uint8), **CALL),
        "text_length: got numbers from 0 to 8; expected 0 to 7",
    ),
    "tile": (lambda: sliding_tile_attention(Q, Q, Q, TWO, 7, seq_shape="4x6x9", tile_size=2), "tile_size: got 2"),  # type: ignore[arg-type]
    "tile_pair": (
        lambda: sliding_tile_attention(Q, Q, Q, TWO, 7, seq_shape="4x6x9", tile_size=(2, 2)),  # type: ignore[arg-type]
        "tile_size: got (2, 2); expected three integers",
    ),
    "tile_zero": (
        lambda: sliding_tile_attention(Q, Q, Q, TWO, 7, seq_shape="4x6x9", tile_size=(0, 2, 3)),
        "tile_size: got (0, 2, 3)",
    ),
    "no_text": (lambda: sliding_tile_attention(Q, Q, Q, TWO, 7, False, **CALL), "q: got seqlens 223 and 223; expected"),
    "short": (
        lambda: sliding_tile_attention(Q, Q, Q, TWO, 7),
        "q: got seqlens 223 and 223; expected q and k of 1152",
    ),
    "keys": (lambda: sliding_tile_attention(Q, Q[:, :, 1:], Q, TWO, 7, **CALL), "q: got seqlens 223 and 222"),
    "shape": (lambda: sliding_tile_attention(Q, Q, Q, TWO, 7, True, "30x48"), "seq_shape: got '30x48'; expected"),
    "shape_tuple": (lambda: sliding_tile_attention(Q, Q, Q, TWO, 7, True, (4, 6, 9)), "seq_shape: got (4, 6, 9)"),  # type: ignore[arg-type]
    "rank": (lambda: sliding_tile_attention(Q[0], Q, Q, TWO, 7, **CALL), "q: got shape (2, 223, 8)"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_is_named(name: str) -> None:
    make, said = BAD[name]
    with pytest.raises(InputError) as caught:
        make()
    assert said in str(caught.value)
    assert caught.value.hint


def test_a_keyword_that_is_not_there_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="dit_seq_shape"):
        sliding_tile_attention(Q, Q, Q, TWO, 7, dit_seq_shape="4x6x9")  # type: ignore[call-arg]
