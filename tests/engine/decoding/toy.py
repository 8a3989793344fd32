"""A table as a model: a random function from a context to logits, decoded plainly and by trees."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilewise.engine.decoding.proposers.base import Proposer
from tilewise.engine.decoding.rules import Rule, Walk
from tilewise.engine.decoding.tree import TokenTree, TreeBatch
from tilewise.engine.decoding.verify import Verified
from tilewise.ops.sampling import sample

ROWS = 2048
PROCESSORS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.5, "top_p": 0.9},
    "warm": {"temperature": 1.0},
    "hot": {"temperature": 1.5, "top_k": 5, "min_p": 0.02},
}


@dataclass
class Toy:
    """Logits of a context by its last `order` tokens (0: by all of them); a large `scale` makes them certain."""

    vocab_size: int = 9
    order: int = 0
    scale: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.table = torch.randn(ROWS, self.vocab_size, generator=generator) * self.scale
        self.forwards = 0

    def logits(self, contexts: Sequence[Sequence[int]]) -> torch.Tensor:
        rows = [zlib.crc32(bytes(each[-self.order :])) % ROWS for each in contexts]
        return self.table[rows]

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        draw = random.Random(self.seed)
        return [[draw.randrange(self.vocab_size) for _ in range(length)] for length in lengths]

    def choose(
        self, contexts: Sequence[Sequence[int]], seeds: Sequence[int], how: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The token after each context, and its distribution before top-k, top-p and min-p."""
        logits, at = self.logits(contexts), torch.tensor([len(each) for each in contexts], dtype=torch.int32)
        numbers = PROCESSORS[how]
        chosen = sample(logits, seeds=torch.tensor(seeds), positions=at, impl="cpu", **numbers).tokens  # type: ignore[arg-type]
        temperature = numbers["temperature"]
        if temperature:
            return chosen, (logits / temperature).softmax(-1)
        return chosen, torch.nn.functional.one_hot(logits.argmax(-1), self.vocab_size).float()

    def plain(self, prompt: Sequence[int], count: int, seed: int, how: str) -> list[int]:
        """Prompt and answer, token by token."""
        text = [*prompt]
        while len(text) < len(prompt) + count:
            text.append(int(self.choose([text], [seed], how)[0][0]))
        return text


@dataclass
class Run:
    """Texts, and of each request the number of steps."""

    texts: list[list[int]]
    steps: list[int]


def decode(
    toy: Toy,
    prompts: Sequence[Sequence[int]],
    proposers: Sequence[Proposer],
    count: int,
    how: str,
    *,
    budget: int = 24,
    cut: Callable[[TokenTree], TokenTree] = lambda tree: tree,
    rule: Rule | None = None,
) -> Run:
    """All requests at once, by trees; request n has seed n."""
    texts = [[*prompt] for prompt in prompts]
    steps = [0] * len(texts)
    rule = rule or Walk()
    while left := [n for n, text in enumerate(texts) if len(text) < len(prompts[n]) + count]:
        trees = [cut(proposers[n].propose(texts[n], budget)) for n in left]
        assert all(tree.tokens[0] == texts[n][-1] for n, tree in zip(left, trees, strict=True))
        assert all(len(tree.tokens) <= budget + 1 for tree in trees)
        batch = TreeBatch.of(trees, [len(texts[n]) - 1 for n in left])
        contexts, seeds = [], []
        for n, tree in zip(left, trees, strict=True):
            for node in range(len(tree.tokens)):
                contexts.append(texts[n] + [tree.tokens[at] for at in tree.path(node)])
                seeds.append(n)
        assert batch.positions.tolist() == [len(each) - 1 for each in contexts]
        chosen, p = toy.choose(contexts, seeds, how)
        found = rule(batch, chosen, p)
        for row, (n, tree) in enumerate(zip(left, trees, strict=True)):
            texts[n] += emitted(found, row)
            steps[n] += 1
            first = int(batch.cu[row])
            proposers[n].observe({own: int(chosen[first + at]) for at, own in enumerate(tree.ids)})
    return Run([text[: len(prompts[n]) + count] for n, text in enumerate(texts)], steps)


def emitted(found: Verified, row: int) -> list[int]:
    """What a tree gives, as a list."""
    tokens = found.emitted[row].tolist()
    count = int(found.accepted[row]) + 1
    assert tokens[count:] == [-1] * (len(tokens) - count)
    assert tokens[count - 1] == int(found.bonus[row])
    return list(tokens[:count])


def random_tree(draw: random.Random, nodes: int, vocab_size: int, *, eligible: float = 1.0) -> TokenTree:
    """Any tree; with a small vocabulary some siblings are equal."""
    parents, values = [-1], [1.0]
    for n in range(1, nodes):
        parents.append(draw.choice([n - 1, draw.randrange(n)]))
        values.append(values[parents[-1]] * draw.choice([0.9, 0.5, 0.2, 1.0]))
    tokens = tuple(draw.randrange(vocab_size) for _ in range(nodes))
    return TokenTree(tokens, tuple(parents), tuple(values), tuple(draw.random() < eligible for _ in range(nodes)))


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """What the leaves spell."""
    leaves = {*range(len(tree.tokens))} - {*tree.parents}
    return {tuple(tree.tokens[n] for n in tree.path(leaf)) for leaf in leaves}
