"""The walk: equal to its specification for any trees, and to plain decoding whatever is proposed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.engine.decoding.toy import PROCESSORS, Toy, decode, emitted, random_tree
from tilewise.core.errors import InputError
from tilewise.engine.decoding.proposers.adversarial import KINDS, AdversarialProposer
from tilewise.engine.decoding.proposers.base import Proposer
from tilewise.engine.decoding.proposers.lookahead import LookaheadProposer
from tilewise.engine.decoding.proposers.merged import MergedProposer
from tilewise.engine.decoding.proposers.ngram import NgramProposer
from tilewise.engine.decoding.proposers.oracle import OracleProposer
from tilewise.engine.decoding.proposers.suffix import SharedSuffixes, SuffixProposer
from tilewise.engine.decoding.rules import Distance, TopK, Typical, Walk
from tilewise.engine.decoding.tree import TokenTree, TreeBatch
from tilewise.engine.decoding.verify import follow, walk, walk_reference

COUNT = 24
LENGTHS = (3, 1, 17, 8)


@pytest.mark.parametrize("sizes", [(1,), (2, 1, 5), (64, 3, 65), (130, 1, 1, 64, 30), ()], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 3])
def test_the_walk_is_its_specification(sizes: tuple[int, ...], vocab_size: int) -> None:
    draw = random.Random(len(sizes) + vocab_size)
    for _ in range(20):
        trees = [random_tree(draw, size, vocab_size, eligible=0.9) for size in sizes]
        batch = TreeBatch.of(trees, [draw.randrange(9) for _ in sizes])
        chosen = [[draw.randrange(vocab_size) for _ in tree.tokens] for tree in trees]
        found = walk(batch, torch.tensor([token for each in chosen for token in each], dtype=torch.int64))
        for n, tree in enumerate(trees):
            path, tokens = walk_reference(tree, chosen[n])
            first = int(batch.cu[n])
            assert emitted(found, n) == tokens
            assert found.path[n].tolist()[: len(path) + 1] == [first, *(first + node for node in path)]
            assert set(found.path[n].tolist()[len(path) + 1 :]) <= {-1}
            assert int(found.last[n]) == int(found.path[n, len(path)])


def test_of_paths_of_one_length_the_first_or_that_with_the_best_score() -> None:
    tree = TokenTree((9, 1, 1, 1, 2, 2, 3), (-1, 0, 0, 0, 1, 2, 4))
    batch, chosen = TreeBatch.of([tree], [4]), torch.tensor([1, 2, 2, 2, 9, 9, 9])
    assert walk(batch, chosen).path.tolist() == [[0, 1, 4, -1]]
    good = torch.tensor([True, True, True, True, True, True, False])
    scores = torch.tensor([0.0, 0.0, 0.0, 5.0, 1.0, 2.0, 7.0])
    assert follow(batch, good, chosen, scores).path.tolist() == [[0, 2, 5, -1]]
    assert follow(batch, good, chosen).path.tolist() == [[0, 1, 4, -1]]
    assert follow(batch, good, chosen, torch.full((7,), torch.nan)).path.tolist() == [[0, 1, 4, -1]]


@pytest.mark.parametrize("rule", [Typical(0.0, 0.0), TopK(3), Distance(9.0)], ids=lambda rule: type(rule).__name__)
def test_logits_that_are_no_numbers_end_any_path(rule: Walk) -> None:
    batch = TreeBatch.of([TokenTree((0, 1, 2, 2), (-1, 0, 1, 0))], [4])
    p = torch.full((4, 3), 1 / 3)
    p[1] = torch.nan
    assert emitted(rule(batch, torch.tensor([0, -1, 2, 2]), p), 0) in ([1, -1], [2, 2])
    p[0] = torch.nan
    assert emitted(rule(batch, torch.tensor([-1, -1, 2, 2]), p), 0) == [-1]


def test_logits_that_are_no_numbers_end_the_walk() -> None:
    batch = TreeBatch.of([TokenTree((9, 1, 2), (-1, 0, 1))], [4])
    found = walk(batch, torch.tensor([1, -1, 2]))
    assert (found.accepted.tolist(), found.bonus.tolist(), found.emitted.tolist()) == ([1], [-1], [[1, -1, -1]])


@pytest.mark.parametrize("rule", [Walk(), Typical(), TopK(2), Distance(1.0)], ids=lambda rule: type(rule).__name__)
def test_nothing_waits_for_the_device(rule: Walk) -> None:
    """A fake tensor has no values: reading one raises an error."""
    batch = TreeBatch.of([random_tree(random.Random(0), 70, 3), TokenTree((9,), (-1,))], [4, 2])
    rows = len(batch.tokens)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors: list[Any] = [mode.from_tensor(x) for x in batch[:-2]]
        fake = batch._replace(**dict(zip(batch._fields, tensors, strict=False)))
        chosen, p = torch.zeros(rows, dtype=torch.int64), torch.full((rows, 3), 1 / 3)
        assert rule(fake, chosen, p).path.shape == (2, batch.max_depth + 1)


MAKERS: dict[str, Callable[[Toy, list[int], list[int]], Proposer]] = {
    "adversarial": lambda toy, prompt, text: AdversarialProposer(toy.vocab_size, seed=len(prompt)),
    "ngram": lambda toy, prompt, text: NgramProposer(branches=3),
    "references": lambda toy, prompt, text: NgramProposer([text[5:], prompt], longest=3),
    "suffix": lambda toy, prompt, text: SuffixProposer(),
    "lookahead": lambda toy, prompt, text: LookaheadProposer(4, 4, 3),
    "merged": lambda toy, prompt, text: MergedProposer(
        [SuffixProposer(), LookaheadProposer(3, 3, 3), AdversarialProposer(toy.vocab_size), OracleProposer(text, 2)]
    ),
    "oracle": lambda toy, prompt, text: OracleProposer(text),
}


@pytest.mark.parametrize("how", PROCESSORS)
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", MAKERS)
def test_tokens_are_plain_decodings_whatever_is_proposed(how: str, order: int, name: str) -> None:
    toy = Toy(order=order, seed=order)
    prompts = toy.prompts(LENGTHS)
    expected = [toy.plain(prompt, COUNT, n, how) for n, prompt in enumerate(prompts)]
    proposers = [MAKERS[name](toy, prompt, text) for prompt, text in zip(prompts, expected, strict=True)]
    draw = random.Random(1)
    found = decode(toy, prompts, proposers, COUNT, how, cut=lambda tree: tree.cut(draw.choice([0, 3, 9, 99])))
    assert found.texts == expected


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_plain_decodings_against_each_adversary(kind: str) -> None:
    toy = Toy(vocab_size=3, scale=3.0)
    prompts = toy.prompts(LENGTHS)
    expected = [toy.plain(prompt, COUNT, n, "warm") for n, prompt in enumerate(prompts)]
    proposers = [AdversarialProposer(3, seed=n, kinds=[kind]) for n in range(len(prompts))]
    found = decode(toy, prompts, proposers, COUNT, "warm", budget=70)
    assert found.texts == expected
    assert kind == "nothing" or min(found.steps) < COUNT  # some of what they propose is right


def test_proposers_of_all_kinds_share_a_batch() -> None:
    toy, shared = Toy(order=1), SharedSuffixes()
    prompts = toy.prompts((4,) * len(MAKERS))
    expected = [toy.plain(prompt, COUNT, n, "cold") for n, prompt in enumerate(prompts)]
    shared.learn(expected[0])
    makers = [MAKERS[name](toy, *each) for name, *each in zip(MAKERS, prompts, expected, strict=True)]
    makers[1] = SuffixProposer(shared)
    assert decode(toy, prompts, makers, COUNT, "cold").texts == expected


@pytest.mark.parametrize("length", [1, 3, 7])
def test_an_oracle_takes_the_fewest_steps(length: int) -> None:
    toy = Toy()
    prompts = toy.prompts((3, 4))
    texts = [toy.plain(prompt, COUNT + length, n, "hot") for n, prompt in enumerate(prompts)]
    found = decode(toy, prompts, [OracleProposer(text, length) for text in texts], COUNT, "hot")
    assert found.steps == [-(-COUNT // (length + 1))] * 2


def test_a_token_depends_on_its_position_and_so_on_the_right_one() -> None:
    """Noise of another position gives other tokens: what the tests above compare would show it."""
    toy = Toy()
    context = toy.prompts((6,))[0]
    one, two = (toy.choose([context[-length:]] * 40, [*range(40)], "warm")[0].tolist() for length in (5, 6))
    assert one != two


def test_chosen_tokens_that_do_not_fit_are_refused() -> None:
    batch = TreeBatch.of([TokenTree((9, 1), (-1, 0))], [4])
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(2)):
        with pytest.raises(InputError, match="chosen"):
            walk(batch, wrong)
