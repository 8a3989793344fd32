"""Details of the library's masks and scores that a comparison of whole attentions could miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError, TilewiseError
from tilewise.testing import plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("num_buckets", "bidirectional", "max_distance"),
    [
        (32, True, 128),
        (32, False, 128),
        (16, True, 64),
        (64, True, 256),
        (8, True, 20),
        (32, True, 1000),
        (128, False, 512),
    ],
)
def test_t5_buckets_of_every_distance(
    num_buckets: int, bidirectional: bool, max_distance: int, dtype: torch.dtype
) -> None:
    """Distances on a bucket's edge (64 of T5's own 32 buckets) fall into T5's bucket in every precision."""
    table = torch.arange(num_buckets, dtype=dtype)[:, None]
    options = {"bidirectional": bidirectional, "max_distance": max_distance}
    zero, middle, j = torch.tensor(0), torch.tensor([1500]), torch.arange(3000)
    score = tw.relative_bias(table, **options)  # type: ignore[arg-type]
    found = score.evaluate(dtype=dtype, s=torch.zeros(3000, dtype=dtype), b=zero, h=zero, i=middle, j=j)
    wanted = plain.relative_bias(table, **options)(torch.zeros(3000, dtype=dtype), zero, zero, middle, j)  # type: ignore[arg-type]
    assert torch.equal(found, wanted)


TABLE = torch.zeros(8, 2)
MORE = torch.ones(2, 2, 2)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "window_zero": (lambda: tw.window(0), "window left: got 0"),
    "prefix_rank": (lambda: tw.prefix(torch.ones(2, 2).long()), "prefix lengths: got torch.int64 of shape (2, 2)"),
    "prefix_list": (lambda: tw.prefix([1, 2]), "prefix lengths: got list; expected an integer tensor of rank 1"),
    "lengths_float": (lambda: tw.lengths(torch.ones(2)), "lengths seqlens: got torch.float32"),
    "document_rank": (lambda: tw.document(MORE.long()), "expected an integer tensor of rank 1 or 2"),
    "tree_rank": (lambda: tw.tree(MORE.long(), MORE.long()), "tree entry: got torch.int64 of shape (2, 2, 2)"),
    "tree_parent": (lambda: tw.tree_times([-1, 7]), "tree parents: got parent 7 of node 1"),
    "blocks_rank": (lambda: tw.blocks(torch.ones(3).bool(), 4), "blocks map: got torch.bool of shape (3,)"),
    "blocks_size": (lambda: tw.blocks(torch.ones(3, 3).bool(), 0), "blocks block_size: got 0"),
    "explicit_rank": (lambda: tw.explicit(MORE.bool()), "expected a boolean tensor of rank 2 or 4"),
    "alibi_rank": (lambda: tw.alibi(MORE), "alibi slopes: got torch.float32 of shape (2, 2, 2)"),
    "softcap_nan": (lambda: tw.softcap(float("nan")), "softcap cap: got nan"),
    "bias_rank": (lambda: tw.bias(torch.ones(3)), "bias: got torch.float32 of shape (3,)"),
    "bias_integer": (lambda: tw.bias(torch.ones(3, 3).long()), "bias: got torch.int64"),
    "relative_bias_small": (lambda: tw.relative_bias(torch.ones(2, 4)), "relative_bias: got 2 buckets"),
    "window_bool": (lambda: tw.window(True), "window left: got True; expected None or an integer >= 1"),
    "window_float": (lambda: tw.window(4, 0.5), "window right: got 0.5; expected None or an integer >= 0"),
    "window_negative": (lambda: tw.window(4, -1), "window right: got -1"),
    "window_too_wide": (lambda: tw.window(2**63), "got 9223372036854775808; expected -2**61 to 2**61 - 1"),
    "chunked": (lambda: tw.chunked(0), "chunked size: got 0; expected an integer >= 1"),
    "dilated": (lambda: tw.dilated("2"), "dilated step: got '2'"),
    "softcap_zero": (lambda: tw.softcap(0), "softcap cap: got 0; expected a finite number > 0"),
    "softcap_infinite": (lambda: tw.softcap(float("inf")), "softcap cap: got inf"),
    "softcap_none": (lambda: tw.softcap(None), "softcap cap: got None"),
    "tree_times": (lambda: tw.tree_times("ab"), "tree parents: got parent 'a' of node 0"),
    "tree_times_number": (lambda: tw.tree_times(3), "tree parents: got int; expected a sequence of integers"),
    "tree_times_cycle": (lambda: tw.tree_times([1, 0]), "tree parents: got a cycle"),
    "explicit_float": (lambda: tw.explicit(torch.zeros(4, 4)), "explicit mask: got torch.float32 of shape (4, 4)"),
    "blocks_float": (lambda: tw.blocks(torch.ones(2, 2), 16), "blocks map: got torch.float32"),
    "document_float": (lambda: tw.document(torch.zeros(4)), "document ids: got torch.float32"),
    "document_falls": (lambda: tw.document(torch.tensor([0, 1, 0]), ascending=True), "document ids: got ids that fall"),
    "alibi_int": (lambda: tw.alibi(torch.arange(4)), "alibi slopes: got torch.int64"),
    "bias_list": (lambda: tw.bias([1.0]), "bias: got list; expected a floating-point tensor of rank 2 or 4"),
    "relative_bias": (lambda: tw.relative_bias(TABLE, max_distance=2), "relative_bias: got 8 buckets, max_distance 2"),
    "relative_bias_float": (lambda: tw.relative_bias(TABLE, max_distance=9.5), "relative_bias max_distance: got 9.5"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_is_named(name: str) -> None:
    make, said = BAD[name]
    with pytest.raises(TilewiseError) as caught:
        make()
    assert said in str(caught.value)
    assert caught.value.hint


def test_an_additive_mask_is_sent_to_the_scores() -> None:
    with pytest.raises(InputError, match=r"score=tilewise\.bias"):
        tw.explicit(torch.zeros(4, 4))


@pytest.mark.parametrize("dynamic", [None, True])
def test_relative_bias_of_changing_tables_compiles(dynamic: bool | None) -> None:
    q = torch.randn(1, 40, 4, 16, generator=torch.Generator().manual_seed(0))

    def biased(table: torch.Tensor) -> torch.Tensor:
        return tw.attention(q, q, q, score=tw.relative_bias(table))

    compiled = torch.compile(biased, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for buckets in (32, 64, 16):
        table = torch.randn(buckets, 4, generator=torch.Generator().manual_seed(buckets))
        torch.testing.assert_close(compiled(table), biased(table))


def test_tree_times_nest() -> None:
    """A node's interval of entry and exit holds its descendants' and no others'."""
    parents = [-1, 0, 0, 1, 1, 2, -1, 6]
    entry, exit_ = tw.tree_times(parents)
    nested = (entry[None, :] <= entry[:, None]) & (exit_[:, None] <= exit_[None, :])
    i, j = torch.arange(8)[:, None], torch.arange(8)
    assert torch.equal(nested, plain.tree(parents, torch.device("cpu"))(0, 0, i, j))
    assert sorted([*entry.tolist(), *exit_.tolist()]) == list(range(16))
