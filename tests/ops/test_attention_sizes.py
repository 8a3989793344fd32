"""Masks and scores made for one batch, number of heads or length are refused by calls of another."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.adapters import flex
from tilewise.adapters.transformers import attention_forward
from tilewise.core.errors import InputError, TilewiseError

BATCH, HEADS, ROWS = 2, 4, 8
Q = torch.randn(BATCH, ROWS, HEADS, 8, generator=torch.Generator().manual_seed(0))
KV = Q[:, :, :2]
WHOLE = torch.tensor([0, ROWS, 2 * ROWS], dtype=torch.int32)
PARTS = torch.tensor([0, 5, 2 * ROWS], dtype=torch.int32)


def ints(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int32)


def true(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


# on which axes a formula has a size, and one that is made for (batch, heads, queries, keys)
MADE: dict[str, tuple[str, Callable[[int, int, int, int], Any]]] = {
    "prefix": ("b", lambda b, h, q, k: tw.prefix(ints(b))),
    "lengths": ("b", lambda b, h, q, k: tw.lengths(ints(b))),
    "document": ("k", lambda b, h, q, k: tw.document(ints(k))),
    "documents": ("bk", lambda b, h, q, k: tw.document(ints(b, k))),
    "ascending": ("bk", lambda b, h, q, k: tw.document(ints(b, k), ascending=True)),
    "tree": ("k", lambda b, h, q, k: tw.tree(ints(k), ints(k))),
    "tree's exit": ("k", lambda b, h, q, k: tw.tree(ints(ROWS), ints(k))),
    "blocks": ("k", lambda b, h, q, k: tw.blocks(true(-(-k // 2), -(-k // 2)), 2)),
    "blocks by head": ("hk", lambda b, h, q, k: tw.blocks(true(h, k, k), 1)),
    "blocks by batch": ("bhk", lambda b, h, q, k: tw.blocks(true(b, h, k, k), 1)),
    "explicit": ("bhqk", lambda b, h, q, k: tw.explicit(true(b, h, q, k))),
    "explicit for all": ("qk", lambda b, h, q, k: tw.explicit(true(q, k))),
    "explicit by head": ("hqk", lambda b, h, q, k: tw.explicit(true(1, h, q, k))),
    "alibi": ("h", lambda b, h, q, k: tw.alibi(torch.ones(h))),
    "alibi by batch": ("bh", lambda b, h, q, k: tw.alibi(torch.ones(b, h))),
    "relative_bias": ("h", lambda b, h, q, k: tw.relative_bias(torch.ones(32, h))),
    "bias": ("bhqk", lambda b, h, q, k: tw.bias(torch.ones(b, h, q, k))),
    "bias for all": ("qk", lambda b, h, q, k: tw.bias(torch.ones(q, k))),
    "neighborhood": ("k", lambda b, h, q, k: tw.neighborhood((2, k // 2), 1)),
    "sliding_tile": ("k", lambda b, h, q, k: tw.sliding_tile((2, k // 2), 1, 1)),
    "with text": ("k", lambda b, h, q, k: tw.sliding_tile((2, 2), 1, 1, text=k - 4)),
    "windows": ("hk", lambda b, h, q, k: tw.sliding_tile((2, k // 2), 1, [(1, 1), *[(2, 1)] * (h - 1)])),
}
AXES = {"b": ("batch", 0), "h": ("num_heads_q", 1), "q": ("seqlen_q", 2), "k": ("seqlen_k", 3)}
RIGHT = (BATCH, HEADS, ROWS, ROWS)
WRONG = [(name, axis, more) for name, (axes, _) in MADE.items() for axis in axes for more in (2, -2)]
LEADING = [(name, axis) for name, (axes, _) in MADE.items() for axis in axes if axis in "bh"]


def other(name: str, axis: str, more: int) -> Any:
    sizes = list(RIGHT)
    sizes[AXES[axis][1]] += more
    return MADE[name][1](*sizes)


def given(formula: Any) -> dict[str, Any]:
    return {"score" if isinstance(formula, tw.Score) else "mask": formula}


@pytest.mark.parametrize("name", MADE)
def test_the_right_size_runs(name: str) -> None:
    formula = MADE[name][1](*RIGHT)
    tw.attention(Q, KV, KV, **given(formula))
    assert pickle.loads(pickle.dumps(formula)).sizes == formula.sizes != ()


@pytest.mark.parametrize(("name", "axis", "more"), WRONG)
def test_another_size_is_refused(name: str, axis: str, more: int) -> None:
    formula = other(name, axis, more)
    joined = formula >> tw.softcap(9.0) if isinstance(formula, tw.Score) else ~(tw.causal & formula) | tw.window(2)
    for one in (formula, joined, formula):  # also when a call like it has been seen
        with pytest.raises(TilewiseError) as caught:
            tw.attention(Q, KV, KV, **given(one))
        # too small ones are refused where indices are proved
        assert AXES[axis][0] in str(caught.value) or (more < 0 and "captured tensor" in str(caught.value))
    with pytest.raises(TilewiseError):
        tw.why(Q, KV, KV, **given(formula))


@pytest.mark.parametrize(("name", "axis"), LEADING)
def test_of_packed_sequences_and_pages_too(name: str, axis: str) -> None:
    right, wrong = MADE[name][1](*RIGHT), other(name, axis, 2)
    pages = KV.reshape(4, 4, 2, 8)
    packed = (Q.flatten(0, 1), KV.flatten(0, 1), KV.flatten(0, 1), tw.Packed(WHOLE))
    paged = (Q, pages, pages, tw.Paged(torch.arange(4).view(2, 2).int(), ints(2) * ROWS))
    for *tensors, layout in (packed, paged):
        tw.attention(*tensors, layout=layout, **given(right))
        with pytest.raises(InputError, match=AXES[axis][0]):
            tw.attention(*tensors, layout=layout, **given(wrong))


def test_a_sequence_is_a_grid_or_its_lengths_differ_as_a_table_says() -> None:
    x, kv = Q.flatten(0, 1), KV.flatten(0, 1)
    grid = tw.neighborhood((2, 4), 1)
    tw.attention(x, kv, kv, layout=tw.Packed(WHOLE), mask=grid)
    with pytest.raises(InputError, match=r"^neighborhood shape: got one for seqlen_k 8; expected seqlen_k 5"):
        tw.attention(x, kv, kv, layout=tw.Packed(PARTS), mask=grid)
    with pytest.raises(InputError, match=r"^neighborhood shape: got one for seqlen_k 32; expected seqlen_k 16 or less"):
        tw.attention(x, kv, kv, layout=tw.Packed(WHOLE), mask=tw.neighborhood((4, 8), 1))
    table = tw.explicit(true(16, 16))  # as long as the longest, or longer
    tw.attention(x, kv, kv, layout=tw.Packed(PARTS), mask=table)
    with pytest.raises(InputError, match=r"^explicit mask: got one for seqlen_k - seqlen_q 0; expected .* 3, as"):
        tw.attention(x[3:], kv, kv, layout=tw.Packed(torch.tensor([0, 2, 13]).int(), PARTS), mask=table)


def test_a_selections_masks_too() -> None:
    with pytest.raises(InputError, match=r"^neighborhood shape: got one for seqlen_k 4"):
        tw.attention(Q, KV, KV, select=tw.Select(tw.neighborhood((2, 2), 1)))
    with pytest.raises(TilewiseError, match=r"index 0 into captured tensor"):
        tw.attention(Q, KV, KV, select=tw.Select(tw.blocks(true(1, 1), 4)))


def test_masks_of_flex_attention() -> None:
    q, kv = Q.transpose(1, 2), KV.transpose(1, 2)
    table = true(3, HEADS + 2)
    for lead, axis in (((3, None), "batch"), ((None, HEADS + 2), "num_heads_q")):
        looks = flex.create_block_mask(lambda b, h, i, j: table[b, h] & (i >= j), *lead, ROWS, ROWS, device="cpu")
        with pytest.raises(InputError, match=f"^block_mask: got one for {axis}"):
            flex.flex_attention(q, kv, kv, block_mask=looks, enable_gqa=True)
        plain = flex.create_block_mask(lambda b, h, i, j: i >= j, *lead, ROWS, ROWS, device="cpu")
        flex.flex_attention(q, kv, kv, block_mask=plain, enable_gqa=True)
    moved = flex.create_block_mask(tw.document(ints(9)), None, None, ROWS, ROWS, device="cpu")
    with pytest.raises(InputError, match=r"^document ids: got one for seqlen_k 9"):
        flex.flex_attention(q, kv, kv, block_mask=moved, enable_gqa=True)


def test_masks_of_transformers() -> None:
    q, kv, layer = Q.transpose(1, 2), KV.transpose(1, 2), torch.nn.Module()
    for mask in (true(3, ROWS), true(3, 1, ROWS, ROWS), torch.zeros(1, 5, ROWS, ROWS), true(1, 1, ROWS + 1, ROWS)):
        with pytest.raises(InputError, match=r"^attention_mask: got shape"):
            attention_forward(layer, q, kv, kv, mask)
    for bias in (torch.zeros(3, 1, ROWS, ROWS), torch.zeros(1, 5, ROWS, ROWS), torch.zeros(1, 1, ROWS, ROWS + 1)):
        with pytest.raises(InputError, match=r"^position_bias: got shape"):
            attention_forward(layer, q, kv, kv, position_bias=bias)
    attention_forward(layer, q, kv, kv, true(BATCH, 1, 1, ROWS + 3), position_bias=torch.zeros(1, 1, 1, ROWS))


def test_compiled_calls_are_checked_and_traced_whole() -> None:
    call = torch.compile(lambda q, kv, keep: tw.attention(q, kv, kv, mask=tw.explicit(keep)), fullgraph=True)
    for rows in (ROWS, ROWS - 1, ROWS - 2):
        call(Q[:, :rows], KV[:, :rows], true(1, 1, rows, rows))
    made = tw.neighborhood((2, 4), 1) & tw.document(ints(ROWS))
    torch.compile(lambda q, kv: tw.attention(q, kv, kv, mask=made), fullgraph=True)(Q, KV)
    with pytest.raises(Exception, match="explicit mask"):
        call(Q, KV, true(3, 1, ROWS, ROWS))
