"""Rejection sampling is exact, by enumeration and by counts that would show its known mistakes; lossy rules say so."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from tests.engine.decoding.toy import Toy, decode, emitted, random_tree
from tilewise.core.errors import InputError
from tilewise.engine.decoding.proposers.adversarial import AdversarialProposer
from tilewise.engine.decoding.proposers.base import Proposer
from tilewise.engine.decoding.proposers.ngram import NgramProposer
from tilewise.engine.decoding.rules import (
    Distance,
    Rejection,
    Rule,
    TopK,
    Typical,
    Walk,
    certain,
    draw,
    reject,
    reject_path,
    without_replacement,
)
from tilewise.engine.decoding.tree import TokenTree, TreeBatch

V = 6
DRAWS = 200_000
SETTINGS = ("independent", "distinct", "certain")


def distributions(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """p of the target and q of the proposer, each with a token of probability 0."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, V, generator=generator, dtype=dtype).mul(1.2).softmax(-1)
    p[seed % V], q[(seed + 1) % V] = 0.0, 0.0
    return p / p.sum(), q / q.sum()


def every_draw(setting: str, q: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All candidates that may come, (n, k), each with its distributions, (n, k, V), and its probability, (n,)."""
    if setting == "certain":
        candidates = q.topk(k).indices[None]
        return candidates, certain(candidates, V, q.dtype), torch.ones(1, dtype=q.dtype)
    candidates = torch.tensor([*itertools.product(range(V), repeat=k)])
    each = q.expand(len(candidates), k, V)
    if setting == "distinct":
        candidates = candidates[[len({*row}) == k for row in candidates.tolist()]]
        each = without_replacement(q.expand(len(candidates), V), candidates)
    weights = each.gather(-1, candidates[..., None])[..., 0].prod(-1)
    return candidates, each, weights


def output(p: torch.Tensor, candidates: torch.Tensor, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The distribution of the emitted token, by summation over everything that may happen."""
    accept, rest = reject(p.expand(len(candidates), V), candidates, q)
    left = torch.cat((torch.ones_like(accept[:, :1]), (1 - accept).cumprod(-1)), -1)
    found = (rest * (left[:, -1:] * weights[:, None])).sum(0)
    return found.index_add(0, candidates.flatten(), (accept * left[:, :-1] * weights[:, None]).flatten())


def variation(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).abs().sum() / 2)


def with_mistake(name: str, q: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`every_draw` with distributions that the candidates were not drawn from."""
    if name == "stale q":  # distinct draws, each with the distribution of the first
        candidates, _, weights = every_draw("distinct", q, k)
    else:  # the most likely ones, as if they had been drawn
        candidates, _, weights = every_draw("certain", q, k)
    return candidates, q.expand(len(candidates), k, V), weights


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_output_has_the_targets_distribution(setting: str, k: int) -> None:
    for seed in range(20):
        p, q = distributions(seed)
        candidates, each, weights = every_draw(setting, q, k)
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12)
        assert variation(output(p, candidates, each, weights), p) < 1e-12


def test_one_draw_is_accepted_as_often_as_can_be() -> None:
    p, q = distributions(3)
    accept = torch.stack([reject(p, torch.tensor([x]), q[None]).accept[0] for x in range(V)])
    assert float((q * accept).sum()) == pytest.approx(1 - variation(p, q), abs=1e-12)


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_distributions_greedy_targets_and_no_candidates(setting: str) -> None:
    p, q = distributions(2)
    greedy = certain(p.argmax(), V, p.dtype)
    for target in (q, greedy):
        assert variation(output(target, *every_draw(setting, q, 2)), target) < 1e-12
    nothing = reject(p, torch.zeros(0, dtype=torch.int64), torch.zeros(0, V, dtype=p.dtype))
    assert nothing.accept.shape == (0,)
    assert torch.equal(nothing.rest, p)


@pytest.mark.parametrize(("mistake", "least"), [("stale q", 0.003), ("top-k as draws", 0.09)])
@pytest.mark.parametrize("k", [2, 3])
def test_enumeration_shows_known_mistakes(mistake: str, least: float, k: int) -> None:
    for seed in range(20):
        p, q = distributions(seed)
        if variation(p, q) > 0.2:  # of equal ones no mistake shows
            assert variation(output(p, *with_mistake(mistake, q, k)), p) > least


def drawn(p: torch.Tensor, candidates: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, seed: int) -> torch.Tensor:
    """Counts of tokens that `draw` gives."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.multinomial(weights, DRAWS, replacement=True, generator=generator)
    rejection = reject(p.expand(len(candidates), V), candidates, q)
    k = candidates.shape[1]
    uniforms = torch.rand(DRAWS, k + 1, generator=generator, dtype=p.dtype)
    index, token = draw(Rejection(*(x[rows] for x in rejection)), uniforms)
    padded = torch.cat((candidates[rows], token[:, None]), 1)
    return padded.gather(1, index[:, None])[:, 0].bincount(minlength=V)


def chance(counts: torch.Tensor, p: torch.Tensor) -> float:
    """The p-value of a chi-square test."""
    there = p > 0
    if int(counts[~there].sum()):
        return 0.0
    expected = p[there] * counts.sum()
    statistic = ((counts[there] - expected) ** 2 / expected).sum()
    half = torch.tensor((int(there.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic.double() / 2))


@pytest.mark.parametrize("setting", SETTINGS)
def test_counts_have_the_targets_distribution(setting: str) -> None:
    for seed in range(3):
        p, q = distributions(seed)
        assert chance(drawn(p, *every_draw(setting, q, 2), seed), p) > 1e-3


def test_counts_would_show_a_total_variation_of_a_hundredth() -> None:
    """The power of the test above, for the change that is hardest to see: in proportion to the probabilities."""
    for seed in range(10):
        p, q = distributions(seed)
        change = p * torch.tensor([1.0, -1.0]).repeat(V // 2)
        positive, negative = change.clamp(min=0), -change.clamp(max=0)
        other = p + 0.01 * (positive / positive.sum() - negative / negative.sum())
        assert variation(p, other) == pytest.approx(0.01)
        assert chance(drawn(other, *every_draw("distinct", q, 2), seed), p) < 1e-6


@pytest.mark.parametrize("mistake", ["stale q", "top-k as draws"])
def test_counts_show_known_mistakes(mistake: str) -> None:
    for seed in range(5):
        p, q = distributions(seed)
        assert chance(drawn(p, *with_mistake(mistake, q, 3), seed), p) < 1e-6


def test_paths_have_the_distribution_of_two_tokens() -> None:
    """Two draws at the root, one after each of them: what is emitted first, and second where there is one."""
    size, generator = 3, torch.Generator().manual_seed(0)
    first, proposed = torch.randn(2, size, generator=generator, dtype=torch.float64).div(3).softmax(-1)
    second, after = torch.randn(2, size, size, generator=generator, dtype=torch.float64).softmax(-1)
    pairs, firsts = torch.zeros(size, size), torch.zeros(size)
    for _ in range(2000):
        tops = torch.multinomial(proposed, 2, generator=generator)
        ends = torch.multinomial(after[tops], 1, generator=generator)[:, 0]
        tree = TokenTree((0, *tops.tolist(), *ends.tolist()), (-1, 0, 0, 1, 2))
        p = torch.cat((first[None], second[tops], torch.zeros(2, size, dtype=torch.float64).fill_(1 / size)))
        q = torch.cat((proposed[None], without_replacement(proposed, tops), after[tops]))
        uniforms = torch.rand(3, 2, 2, generator=generator, dtype=torch.float64)
        path, tokens = reject_path(tree, p, q, uniforms)
        assert [tree.tokens[n] for n in path] == tokens[:-1]
        firsts[tokens[0]] += 1
        if path:
            pairs[tokens[0], tokens[1]] += 1
    assert chance(firsts, first) > 1e-3
    for token in range(size):
        assert pairs[token].sum() > 300
        assert chance(pairs[token], second[token]) > 1e-3
        assert chance(pairs[token], after[token]) < 1e-3


def test_a_draw_never_gives_a_token_of_probability_0() -> None:
    rest = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    rejection = Rejection(torch.zeros(4, 0), rest.expand(4, 5))
    index, token = draw(rejection, torch.tensor([[0.0], [0.29], [0.31], [math.nextafter(1.0, 0.0)]]))
    assert index.tolist() == [0] * 4
    assert token.tolist() == [1, 1, 3, 3]


def test_shapes_that_do_not_fit_are_refused() -> None:
    p, q = distributions(0)
    for candidates, each in (
        (torch.tensor([1, 2]), q[None]),
        (torch.tensor([1]), q),
        (torch.tensor([1]), q[None].float()),
    ):
        with pytest.raises(InputError, match="q"):
            reject(p, candidates, each)


def test_rules_say_whether_they_are_lossy() -> None:
    assert not Walk.lossy
    assert all(rule.lossy for rule in (Typical, TopK, Distance))


def one_hot_trees() -> tuple[TreeBatch, torch.Tensor, torch.Tensor, list[TokenTree]]:
    """Trees, and a target that is certain of a token at each row."""
    draw_ = random.Random(0)
    trees = [random_tree(draw_, size, 3) for size in (1, 9, 66, *[40] * 12)]
    batch = TreeBatch.of(trees, [*range(15)])
    chosen = torch.tensor([draw_.randrange(3) for _ in batch.tokens])
    return batch, chosen, torch.nn.functional.one_hot(chosen, 3).float(), trees


@pytest.mark.parametrize("rule", [Walk(), Typical(), TopK(1), Distance(0)], ids=lambda rule: type(rule).__name__)
def test_of_a_certain_target_every_rule_is_the_walk(rule: Walk) -> None:
    batch, chosen, p, trees = one_hot_trees()
    found, expected = rule(batch, chosen, p), Walk()(batch, chosen, p)
    for row in range(len(trees)):
        assert emitted(found, row) == emitted(expected, row)
    assert int(expected.accepted.max()) > 1


@pytest.mark.parametrize("how", ["warm", "hot", "greedy"])
def test_typical_with_infinite_bounds_is_plain_decoding(how: str) -> None:
    toy = Toy(order=1)
    prompts = toy.prompts((3, 5))
    expected = [toy.plain(prompt, 20, n, how) for n, prompt in enumerate(prompts)]
    proposers: list[Proposer] = [AdversarialProposer(9), NgramProposer()]
    found = decode(toy, prompts, proposers, 20, how, rule=Typical(math.inf, math.inf))
    assert found.texts == expected
    assert found.steps == [20, 20]


def test_typical_accepts_by_entropy() -> None:
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 7)
    entropy = float(-(p[0] * p[0].log()).sum())
    batch = TreeBatch.of([TokenTree((0, 3, 2, 1, 3, 2, 1), (-1, 0, 0, 0, 1, 2, 3))], [1])
    chosen = torch.zeros(7, dtype=torch.int64)
    assert emitted(Typical(0.4, 1e9)(batch, chosen, p), 0) == [0]
    assert emitted(Typical(0.29, 1e9)(batch, chosen, p), 0) == [1, 1, 0]
    assert emitted(Typical(0.1, 1e9)(batch, chosen, p), 0) == [1, 1, 0]  # of equal length the most likely
    for bound, expected in ((0.31, [0]), (0.29, [1, 1, 0])):
        assert emitted(Typical(1.0, bound * math.exp(entropy))(batch, chosen, p), 0) == expected
    assert emitted(Typical()(batch, chosen, p), 0) == emitted(Typical(0.09, 0.3)(batch, chosen, p), 0)


def test_top_k_and_distance_accept_what_is_near() -> None:
    p = torch.tensor([[0.1, 0.4, 0.3, 0.1, 0.1]] * 5)
    batch = TreeBatch.of([TokenTree((0, 0, 3, 2, 4), (-1, 0, 1, 0, 3))], [1])
    chosen = torch.full((5,), 1)
    lengths: dict[Rule, int] = {
        TopK(1): 1,
        TopK(2): 2,
        TopK(3): 2,
        TopK(4): 3,
        Distance(0): 1,
        Distance(1): 2,
        Distance(2): 3,
    }
    assert {rule: len(emitted(rule(batch, chosen, p), 0)) for rule in lengths} == lengths
    assert emitted(TopK(3)(batch, chosen, p), 0) == [2, 1]  # of equal length the most likely
    assert emitted(Distance(1)(batch, chosen, p), 0) == [0, 1]


@pytest.mark.parametrize(
    "make", [lambda: Typical(-1.0), lambda: Typical(0.1, math.nan), lambda: TopK(0), lambda: Distance(-1)]
)
def test_bounds_out_of_range_are_refused(make: type[Walk]) -> None:
    with pytest.raises(InputError, match="at least"):
        make()
