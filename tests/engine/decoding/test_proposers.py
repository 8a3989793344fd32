"""Proposers: what they propose, how little of the context they read, and what they learn."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.engine.decoding.toy import Toy, decode, paths
from tilewise.core.errors import InputError
from tilewise.engine import decoding
from tilewise.engine.decoding.proposers.adversarial import KINDS, AdversarialProposer
from tilewise.engine.decoding.proposers.base import Acceptance, Proposer
from tilewise.engine.decoding.proposers.lookahead import LookaheadProposer
from tilewise.engine.decoding.proposers.merged import MergedProposer
from tilewise.engine.decoding.proposers.ngram import NgramProposer
from tilewise.engine.decoding.proposers.oracle import OracleProposer
from tilewise.engine.decoding.proposers.suffix import (
    CountedTrie,
    SharedSuffixes,
    SuffixProposer,
    TrieReader,
    TrieWriter,
    _continued,
)
from tilewise.engine.decoding.tree import TokenTree

EXAMPLES = [found.name for found in pkgutil.walk_packages(decoding.__path__, f"{decoding.__name__}.")]
ALL: dict[str, Callable[[], Proposer]] = {
    "ngram": lambda: NgramProposer(branches=2),
    "suffix": lambda: SuffixProposer(SharedSuffixes()),
    "lookahead": lambda: LookaheadProposer(3, 4, 2),
    "oracle": lambda: OracleProposer([1] * 500),
    "adversarial": lambda: AdversarialProposer(9),
    "merged": lambda: MergedProposer([NgramProposer(), SuffixProposer()]),
}


class Counted(list[int]):
    """A context that counts the tokens that are read."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Any:
        raise AssertionError("all of it would be read")


def text(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(length)]


@pytest.mark.parametrize("name", [name for name in ALL if name != "adversarial"])
def test_a_step_reads_new_tokens_alone(name: str) -> None:
    proposer = ALL[name]()
    proposer.propose(text(300, 5), 16)
    context = Counted(text(300, 5))
    for token in text(20, 5, seed=1):
        context.append(token)
        context.read = 0
        proposer.propose(context, 16)
        assert context.read <= 16


@pytest.mark.parametrize("name", ALL)
def test_a_tree_keeps_to_its_budget_and_begins_with_the_pending_token(name: str) -> None:
    proposer, context = ALL[name](), text(40, 3)
    assert isinstance(proposer, Proposer)
    for budget in (0, 1, 2, 5, 100):
        context += text(2, 3, seed=budget)
        tree = proposer.propose(context, budget)
        assert len(tree.tokens) <= budget + 1
        assert tree.tokens[0] == context[-1]
        proposer.observe(dict.fromkeys(tree.ids, 1))


@pytest.mark.parametrize("name", ALL)
def test_bad_calls_are_refused(name: str) -> None:
    proposer = ALL[name]()
    with pytest.raises(InputError, match="budget"):
        proposer.propose([1, 2], -1)
    with pytest.raises(InputError, match="context"):
        proposer.propose([], 4)
    proposer.propose([1, 2, 3], 4)
    with pytest.raises(InputError, match="context"):
        proposer.propose([1, 2], 4)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: NgramProposer(longest=2, shortest=3), "shortest"),
        (lambda: NgramProposer(length=0), "length"),
        (lambda: SuffixProposer(depth=1), "depth"),
        (lambda: SuffixProposer(factor=0.0), "factor"),
        (lambda: SharedSuffixes(most=0), "most"),
        (lambda: LookaheadProposer(window=0), "window"),
        (lambda: LookaheadProposer(ngram=2), "ngram"),
        (lambda: LookaheadProposer(worth=2.0), "worth"),
        (lambda: MergedProposer([]), "parts"),
        (lambda: OracleProposer([1], length=0), "length"),
        (lambda: AdversarialProposer(9, kinds=["honest"]), "kinds"),
    ],
)
def test_bad_options_are_refused(make: Callable[[], Proposer], name: str) -> None:
    with pytest.raises(InputError) as error:
        make()
    assert error.value.name == name


def test_adversaries_make_what_their_names_say() -> None:
    trees = {kind: AdversarialProposer(9, kinds=[kind]).propose([1, 2, 3], 70) for kind in KINDS}
    assert len(trees["nothing"].tokens) == 1
    assert all(len(tree.tokens) == 71 for kind, tree in trees.items() if kind != "nothing")
    assert max(trees["chain"].depths) == 70
    assert max(trees["star"].depths) == 1
    siblings = Counter(zip(trees["duplicates"].parents, trees["duplicates"].tokens, strict=True))
    assert max(siblings.values()) > 1


class TestNgram:
    def test_the_longest_match_wins_then_the_most_recent(self) -> None:
        context = [1, 2, 3, 50, 9, 2, 3, 60, 4, 2, 3, 70, 1, 2, 3]
        assert NgramProposer(longest=3, length=2).propose(context, 9).tokens == (3, 50, 9)
        assert NgramProposer(longest=2, length=2).propose(context, 9).tokens == (3, 70, 1)

    def test_matches_become_branches(self) -> None:
        context = [1, 2, 3, 50, 9, 2, 3, 60, 4, 2, 3, 60, 5, 2, 3]
        tree = NgramProposer(longest=2, length=2, branches=3).propose(context, 9)
        assert paths(tree) == {(60, 5), (60, 4), (50, 9)}
        assert tree.tokens[1:3] == (60, 5)  # the most recent one first
        assert tree.values[1] > tree.values[tree.tokens.index(50)]
        assert len(tree.tokens) == 6

    def test_references_end_where_they_end(self) -> None:
        found = NgramProposer([[7, 8, 9], [8, 1]], longest=2).propose([5, 7, 8], 9)
        assert found.tokens == (8, 9)

    def test_copies_end_with_an_end_token(self) -> None:
        assert NgramProposer(ends=[0]).propose([1, 2, 0, 3, 1], 9).tokens == (1, 2, 0)

    def test_nothing_is_proposed_without_a_match(self) -> None:
        assert NgramProposer().propose([1, 2, 3], 9).tokens == (3,)
        assert NgramProposer(shortest=2).propose([1, 2, 1], 9).tokens == (1,)

    def test_values_follow_what_was_right(self) -> None:
        values = {}
        for name, tokens in (("repeated", [1, 2] * 30), ("random", text(60, 8))):
            proposer = NgramProposer(longest=1)
            for end in range(1, len(tokens) + 1):
                tree = proposer.propose(tokens[:end], 4)
            values[name] = tree.values
        assert len(values["repeated"]) == 5  # what is copied goes on beyond the end of the text
        assert values["repeated"][1] > 0.9
        assert values["random"][1] < 0.3


def brute_force(words: Sequence[Sequence[int]], string: Sequence[int], depth: int) -> Counter[int]:
    """What follows a string in the texts; strings of `depth` tokens at most are counted."""
    n = len(string)
    return Counter(
        word[at + n] for word in words for at in range(len(word) - n) if [*word[at : at + n]] == [*string] and n < depth
    )


class TestSuffix:
    @pytest.mark.parametrize("vocab_size", [1, 2, 3, 12])
    def test_counts_are_those_of_all_strings(self, vocab_size: int) -> None:
        depth, words = 6, [text(60, vocab_size, seed) for seed in range(3)]
        trie = CountedTrie(depth)
        for word in words:
            writer = TrieWriter(trie)
            for token in word:
                writer.append(token)
        for seed in range(20):
            context, reader = text(8, vocab_size, 50 + seed), TrieReader(trie)
            for token in context:
                reader.append(token)
            for length in range(depth // 2 + 1):
                string = context[len(context) - length :]
                counts = brute_force(words, string, depth)
                if length >= len(reader.places):
                    assert not brute_force([[*word, -1] for word in words], string, depth)
                    continue
                found = {token: share for token, share, _ in _continued(reader.places[length])}
                assert len(found) == min(4, len(counts))
                total = sum(counts.values())
                assert found == {token: counts[token] / total for token in found}
                assert sorted((counts[token] for token in found), reverse=True) == [
                    n for _, n in counts.most_common(len(found))
                ]

    @pytest.mark.parametrize("vocab_size", [1, 2, 5, 40])
    def test_a_writer_knows_which_suffixes_occurred_before(self, vocab_size: int) -> None:
        depth, context = 8, text(120, vocab_size)
        writer = TrieWriter(CountedTrie(depth))
        for end, token in enumerate(context, 1):
            writer.append(token)
            now, places = context[:end], writer.places
            for length in range(1, depth):
                counts = brute_force([now], now[end - length :], depth) if length <= end else Counter()
                assert (length < len(places)) == bool(counts)
                if counts:
                    found = {token: share for token, share, _ in _continued(places[length])}
                    assert found == {token: counts[token] / sum(counts.values()) for token in found}

    def test_a_reader_keeps_its_place_in_texts_that_are_learned_meanwhile(self) -> None:
        depth, shared, words = 12, SharedSuffixes(depth=12), [text(60, 20)]
        shared.learn(words[0])
        reader = TrieReader(shared.tries[0])
        for n, token in enumerate(words[0]):
            reader.append(token)
            if n % 5 == 4:
                words.append([*words[0][n - 4 : n + 1], *text(9, 20, seed=n)])
                shared.learn(words[-1])
            for length in range(1, len(reader.places)):
                counts = brute_force(words, words[0][n + 1 - length : n + 1], depth)
                found = {token: share for token, share, _ in _continued(reader.places[length])}
                assert len(found) == min(4, len(counts))
                assert found == {token: counts[token] / sum(counts.values()) for token in found}

    def test_strings_that_occur_once_cost_one_leaf(self) -> None:
        trie = CountedTrie(32)
        writer = TrieWriter(trie)
        for token in range(1000):
            writer.append(token)
        assert trie.size == 1000

    def test_the_most_frequent_continuations_come_first(self) -> None:
        context = [1, 2, 3, 1, 2, 4, 1, 2, 4, 9, 1, 2]
        tree = SuffixProposer().propose(context, 4)
        assert tree.tokens[:3] == (2, 4, 3)
        assert tree.values[1] > tree.values[2]

    def test_a_longer_match_gives_a_longer_draft(self) -> None:
        sizes = []
        for repeated in (1, 2, 5, 12):
            word = [*range(100, 100 + 40)]
            sizes.append(len(SuffixProposer(factor=2.0).propose([*word, 1, *word[:repeated]], 99).tokens) - 1)
        assert sizes == sorted(sizes)
        assert sizes[0] == 2
        assert sizes[-1] > 8

    def test_others_answers_are_used(self) -> None:
        shared = SharedSuffixes()
        shared.learn([5, 6, 7, 8, 9])
        proposer = SuffixProposer(shared)
        assert proposer.propose([1, 5, 6], 8).tokens == (6, 7, 8, 9)
        shared.learn([1, 5, 6, 2, 3, 4])
        shared.learn([1, 5, 6, 2, 3, 4])
        assert SuffixProposer(shared).propose([1, 5, 6], 8).tokens[:3] == (6, 2, 3)
        assert SuffixProposer(shared).propose([0, 9], 8).tokens == (9,)  # the text ends there

    def test_a_full_trie_is_replaced_and_the_last_one_is_still_read(self) -> None:
        shared = SharedSuffixes(most=10)
        proposer = SuffixProposer(shared)
        shared.learn(range(20))
        assert proposer.propose([90, 5, 6], 4).tokens[:2] == (6, 7)
        shared.learn(range(40, 60))
        assert len(shared.tries) == 2
        assert proposer.propose([90, 5, 6, 45, 46], 4).tokens[:2] == (46, 47)
        assert proposer.propose([90, 5, 6, 45, 46, 8, 9], 4).tokens[:2] == (9, 10)
        shared.learn(range(70, 90))
        assert len(shared.tries) == 2
        assert proposer.propose([90, 5, 6, 45, 46, 8, 9, 3, 4], 4).tokens == (4,)

    def test_repeated_text_takes_few_steps(self) -> None:
        toy = Toy(vocab_size=40, order=1)
        prompt = toy.prompts((8,))[0]
        greedy = decode(toy, [prompt], [SuffixProposer()], 200, "greedy")
        assert greedy.steps[0] < 60


class Noting:
    """Proposes a fixed tree, and keeps what it is told."""

    def __init__(self, tree: TokenTree) -> None:
        self.tree, self.told = tree, dict[int, int]()

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        return self.tree

    def observe(self, chosen: Any) -> None:
        self.told = dict(chosen)


def test_parts_of_a_merged_proposal_are_told_about_their_own_nodes() -> None:
    parts = [
        Noting(TokenTree((1, 2, 3), (-1, 0, 1), (1.0, 0.5, 0.1))),
        Noting(TokenTree((1, 4, 2), (-1, 0, 0), (1.0, 0.9, 0.8))),
    ]
    tree = MergedProposer(parts).propose([1], 9)
    assert tree.tokens == (1, 2, 3, 4)
    assert tree.values == (1.0, 0.8, 0.1, 0.9)
    proposer = MergedProposer(parts)
    cut = proposer.propose([1], 2)
    assert cut.ids == (0, 1, 3)
    proposer.observe({0: 10, 1: 11, 3: 13})
    assert [part.told for part in parts] == [{0: 10, 1: 11}, {0: 10, 1: 13, 2: 11}]


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_runs(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


def test_acceptance_is_counted_where_the_walk_went() -> None:
    rates = Acceptance(prior=0.5, weight=2.0, memory=1.0)
    tree = TokenTree((9, 1, 2, 3, 4), (-1, 0, 0, 2, 1))
    keys = ((None, 1.0), ("first", 0.75), ("second", 0.5), ("deep", 1.0), ("other", 1.0))
    for tokens in ([2, 3, 7], [2, 5], [6]):
        rates.proposed(tree, keys)
        rates.emitted(tokens)
    rates.emitted([1])  # there was no proposal
    assert rates.rate("first") == pytest.approx(1 / (3 * 0.75 + 2))
    assert rates.rate("second") == pytest.approx((2 + 1) / (3 * 0.5 + 2))
    assert rates.rate("deep") == pytest.approx((1 + 1) / (2 + 2))
    assert rates.rate("other") == 0.5
    assert rates.rate("new", 0.9) == pytest.approx(0.9)
