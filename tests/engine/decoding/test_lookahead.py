"""The lookahead window: its tree, its n-grams, and what they save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.engine.decoding.toy import Toy, decode, paths
from tilewise.engine.decoding.proposers.lookahead import LookaheadProposer
from tilewise.engine.decoding.tree import TokenTree


def test_the_window_is_a_tree_of_levels() -> None:
    window, ngram = 4, 4
    proposer, toy = LookaheadProposer(window, ngram, worth=0.2), Toy(vocab_size=250, order=1)
    context = toy.prompts((9,))[0]
    for _ in range(ngram - 2):  # levels are filled one by one
        tree = proposer.propose(context, 99)
        proposer.observe(answers(toy, context, tree))
        context = [*context, int(toy.logits([context])[0].argmax())]
    tree = proposer.propose(context, 99)
    inside = [n for n in range(1, len(tree.tokens)) if not tree.eligible[n]]
    assert len(inside) == window * (ngram - 1) - 1
    assert {tree.values[n] for n in inside} == {0.2}
    by_depth = Counter(tree.depths[n] for n in inside)
    assert by_depth == Counter(l + c for l in range(ngram - 1) for c in range(window) if l + c)
    leaves = [n for n in inside if n not in tree.parents]
    assert len(leaves) == window
    for column, leaf in enumerate(sorted(leaves)):
        # level-0 tokens up to its column, then its own column
        path = [0, *tree.path(leaf)]
        assert len(path) == column + ngram - 1
        assert path[: column + 1] == [*range(column + 1)]


def answers(toy: Toy, context: Sequence[int], tree: TokenTree) -> dict[int, int]:
    """The most likely token after each node."""
    contexts = [[*context, *(tree.tokens[m] for m in tree.path(n))] for n in range(len(tree.tokens))]
    return dict(enumerate(toy.logits(contexts).argmax(-1).tolist()))


def test_n_grams_of_the_window_are_the_models() -> None:
    """Of a model that sees one token: each is what the model says after the one before, but that the pending token
    may be another than the window had there.
    """
    toy = Toy(vocab_size=250, order=1)
    proposer, context = LookaheadProposer(3, 4, 8, from_context=False), toy.prompts((9,))[0]
    after = {token: int(toy.logits([[token]])[0].argmax()) for token in range(250)}
    for _ in range(8):
        proposer.observe(answers(toy, context, proposer.propose(context, 99)))
        context = [*context, after[context[-1]]]
    pool = proposer._pool
    assert sum(map(len, pool.values())) > 5
    for guesses in pool.values():
        for guess in guesses:
            assert len(guess) == 3
            assert [after[token] for token in guess[:-1]] == [*guess[1:]]
    found = [after[key] == guess[0] for key, guesses in pool.items() for guess in guesses]
    assert sum(found) > len(found) / 2


def test_the_pool_keeps_the_newest() -> None:
    context = [1, 2, 3, 1, 4, 5, 1, 6, 7, 1, 2, 3, 1]
    tree = LookaheadProposer(1, 3, 2).propose(context, 0)
    assert tree.tokens == (1,)
    tree = LookaheadProposer(2, 3, 2).propose(context, 99)
    eligible = [path for path in paths(tree) if path in {(2, 3), (6, 7), (4, 5)}]
    assert sorted(eligible) == [(2, 3), (6, 7)]


def test_a_window_that_does_not_fit_is_left_out_and_stays() -> None:
    proposer = LookaheadProposer(5, 4, 3)
    tree = proposer.propose([1, 2, 3, 4, 1], 3)
    assert all(tree.eligible)
    assert paths(tree) == {(2, 3, 4)}
    levels = [[*level] for level in proposer._levels]
    proposer.observe(dict.fromkeys(range(4), 7))
    assert proposer._levels == levels
    tree = proposer.propose([1, 2, 3, 4, 1, 2], 99)
    proposer.observe({})  # the window was cut
    assert proposer._levels == levels


def test_text_that_the_model_repeats_takes_few_steps() -> None:
    toy = Toy(vocab_size=40, order=1)
    prompt = toy.prompts((8,))[0]
    found = decode(toy, [prompt], [LookaheadProposer(4, 4, 4)], 120, "greedy")
    assert found.steps[0] < 50
