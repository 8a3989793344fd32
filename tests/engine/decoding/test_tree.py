"""Trees of tokens: order, ancestors, positions, merging, cutting and flattening."""

from __future__ import annotations

import random

import pytest
import torch

from tests.engine.decoding.toy import random_tree
from tilewise.core.errors import InputError
from tilewise.engine.decoding.tree import TokenTree, TreeBatch, TreeBuilder, merge

TREES = [
    TokenTree((5,), (-1,)),  # nothing proposed
    TokenTree((5, 6), (-1, 0)),
    TokenTree((5, *range(100)), (-1, *range(100))),  # of width 1
    TokenTree((5, *range(100)), (-1, *[0] * 100)),  # of depth 1
    TokenTree((5, 6, 6, 6, 6), (-1, 0, 0, 1, 2)),  # equal siblings
    *(random_tree(random.Random(nodes), nodes, 4) for nodes in (3, 63, 64, 65, 128, 129, 200)),
]


def seen(tree: TokenTree, node: int) -> set[int]:
    return {0, *tree.path(node)}


def spelled(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree.tokens))}


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{len(tree.tokens)}")
def test_ancestors_and_depths_follow_from_parents(tree: TokenTree) -> None:
    for node, bits in enumerate(tree.ancestors):
        assert {n for n in range(len(tree.tokens)) if bits >> n & 1} == seen(tree, node)
        assert tree.depths[node] == len(tree.path(node))


def test_a_batch_is_its_trees_one_after_another() -> None:
    lengths = [7 * n for n in range(len(TREES))]
    batch = TreeBatch.of(TREES, lengths)
    assert batch.max_nodes == max(len(tree.tokens) for tree in TREES)
    assert batch.max_depth == max(max(tree.depths) for tree in TREES)
    assert batch.ancestors.dtype == torch.int64
    assert batch.ancestors.shape == (len(batch.tokens), -(-batch.max_nodes // 64))
    first = 0
    for n, tree in enumerate(TREES):
        assert int(batch.cu[n]) == first
        for node, (token, up, depth) in enumerate(zip(tree.tokens, tree.parents, tree.depths, strict=True)):
            row = first + node
            assert int(batch.tokens[row]) == token
            assert int(batch.parents[row]) == first + max(up, 0)
            assert int(batch.positions[row]) == lengths[n] + depth
            assert int(batch.trees[row]) == n
            assert bool(batch.eligible[row]) == (node > 0)
            words = batch.ancestors[row].tolist()
            assert {m for m in range(64 * len(words)) if words[m // 64] >> m % 64 & 1} == seen(tree, node)
        first += len(tree.tokens)
    assert int(batch.cu[-1]) == len(batch.tokens) == first


def test_a_batch_of_no_trees() -> None:
    batch = TreeBatch.of([], [])
    assert batch.tokens.shape == (0,)
    assert batch.cu.tolist() == [0]
    assert batch.ancestors.shape == (0, 1)


def test_merging_keeps_every_path_once_with_its_largest_value() -> None:
    trees = [random_tree(random.Random(seed), 40, 3) for seed in range(4)]
    trees = [TokenTree((1, *tree.tokens[1:]), tree.parents, tree.values) for tree in trees]
    merged, maps = merge(trees)
    assert spelled(merged) == set().union(*map(spelled, trees))
    assert len(merged.tokens) == len(spelled(merged))
    best: dict[int, float] = {}
    for tree, places in zip(trees, maps, strict=True):
        for node, at in enumerate(places):
            assert [merged.tokens[n] for n in merged.path(at)] == [tree.tokens[n] for n in tree.path(node)]
            best[at] = max(best.get(at, 0.0), tree.values[node])
    assert [best[n] for n in range(len(merged.tokens))] == [*merged.values]
    again, same = merge([merged])
    assert again == merged
    assert same == [[*range(len(merged.tokens))]]


def test_nodes_that_only_the_proposer_needs_stay_apart() -> None:
    builder = TreeBuilder(5)
    assert [builder.add(0, 7, 0.5), builder.add(0, 7, 0.5, eligible=False), builder.add(0, 7, 0.9)] == [1, 2, 1]
    assert builder.add(1, 8, 1.0) == 3
    assert builder.tree().values == (1.0, 0.9, 0.5, 0.9)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{len(tree.tokens)}")
def test_a_cut_tree_has_the_most_valuable_nodes(tree: TokenTree) -> None:
    for nodes in {0, 1, 2, 5, 64, len(tree.tokens) - 1, len(tree.tokens) + 3}:
        kept = tree.cut(nodes)
        count = min(nodes, len(tree.tokens) - 1)
        assert len(kept.tokens) == count + 1
        assert sorted(kept.values[1:], reverse=True) == sorted(tree.values[1:], reverse=True)[:count]
        for node, own in enumerate(kept.ids):
            assert tuple(kept.ids[n] for n in kept.path(node)) == tree.path(own)
            assert kept.tokens[node] == tree.tokens[own]
        assert kept.cut(1).ids == tree.cut(min(1, nodes)).ids  # numbers of the first tree


def test_nodes_for_the_proposer_are_cut_together() -> None:
    values, eligible = (1.0, 0.5, 0.5, 0.9, 0.4, 0.1), (True, False, False, True, True, True)
    tree = TokenTree((9, 1, 2, 3, 4, 5), (-1, 0, 1, 0, 3, 3), values, eligible)
    assert [tree.cut(nodes).ids for nodes in range(6)] == [
        (0,), (0, 3), (0, 3, 4), (0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("parents", ((), ())),
        ("parents", ((1, 2), (-1,))),
        ("parents", ((1, 2), (0, 0))),
        ("parents", ((1, 2, 3), (-1, 2, 0))),
        ("parents", ((1, 2), (-1, -1))),
        ("values", ((1, 2), (-1, 0), (1.0,))),
        ("values", ((1, 2, 3), (-1, 0, 1), (1.0, 0.5, 0.6))),
        ("values", ((1, 2), (-1, 0), (1.0, float("nan")))),
        ("eligible", ((1, 2), (-1, 0), (), (True,))),
        ("ids", ((1, 2), (-1, 0), (), (), (0,))),
    ],
)
def test_what_is_no_tree_is_refused(name: str, arguments: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InputError) as error:
        TokenTree(*arguments)  # type: ignore[arg-type]
    assert error.value.name == name


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match="nodes"):
        TREES[2].cut(-1)
    with pytest.raises(InputError, match="one root"):
        merge([])
    with pytest.raises(InputError, match="one root"):
        merge([TREES[1], TokenTree((4,), (-1,))])
    with pytest.raises(InputError, match="lengths"):
        TreeBatch.of(TREES[:2], [1])
