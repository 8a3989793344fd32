"""What engines are asked: requests of random tokens, when they come, and what follows from their answers."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

NANO = 256  # requests of nano-vllm's bench.py
VOCAB = 10_000  # whose random tokens are below this


@dataclass(frozen=True)
class Request:
    """A prompt, tokens of its answer, when it comes (seconds), and what a user adds to each answer in turn."""

    prompt: tuple[int, ...]
    count: int
    arrival: float = 0.0
    turns: tuple[tuple[int, ...], ...] = ()

    def following(self, answer: Sequence[int]) -> Request | None:
        """The next turn: prompt and answer, and what comes after them; None after the last."""
        if not self.turns:
            return None
        return Request((*self.prompt, *answer, *self.turns[0]), self.count, 0.0, self.turns[1:])


@dataclass(frozen=True)
class Turn:
    """Sizes of one prompt and its answer: how many tokens there are, and how many an earlier turn has computed."""

    known: int
    prompt: int
    count: int


@dataclass(frozen=True)
class Workload:
    """Requests, in words and one by one; all prompts begin with the same `shared` tokens."""

    says: str
    requests: tuple[Request, ...]
    shared: int = 0

    def turns(self) -> Iterator[Turn]:
        """All prompts that will be sent; the last token of an answer has not been computed when its turn ends."""
        for request in self.requests:
            known, prompt = 0, len(request.prompt)
            for new in (*request.turns, ()):
                yield Turn(known, prompt, request.count)
                known, prompt = prompt + request.count - 1, prompt + request.count + len(new)

    @property
    def prompt_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.prompt for turn in self.turns())

    @property
    def output_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.count for turn in self.turns())

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer at most."""
        return max(turn.prompt + turn.count for turn in self.turns())

    @property
    def tokens(self) -> int:
        """That are alive at the same time at most."""
        last = [list(Workload("", (request,)).turns())[-1] for request in self.requests]
        return sum(turn.prompt + turn.count for turn in last)

    def with_other_tokens(self, number: int, vocab: int) -> Workload:
        """The same sizes; no prompt begins as one of another `number` does, so that none is known."""

        def other(tokens: tuple[int, ...]) -> tuple[int, ...]:
            return tuple((token + number) % vocab for token in tokens)

        changed = (
            replace(request, prompt=other(request.prompt), turns=tuple(map(other, request.turns)))
            for request in self.requests
        )
        return replace(self, requests=tuple(changed))


@dataclass(frozen=True)
class Sizes:
    """How large workloads are; `shorter` divides the lengths of prompts, `briefer` those of answers."""

    requests: int
    few: int
    shorter: int
    briefer: int
    rates: tuple[float, ...]  # requests a second
    sharers: int
    prefix: int
    conversations: int
    turns: int
    texts: int  # tokens after each text of part smollm2


GPU = Sizes(NANO, 64, 1, 1, (8.0, 16.0, 32.0), 64, 8192, 16, 5, 64)
CPU = Sizes(16, 8, 8, 16, (0.5, 1.0, 2.0), 16, 1024, 4, 3, 64)
QUICK = Sizes(3, 2, 64, 256, (100.0,), 3, 40, 2, 2, 2)


def nano(sizes: Sizes, requests: int, briefer: int = 1) -> Workload:
    """nano-vllm's bench.py, the first of its requests."""
    made = tuple(
        Request(prompt[: max(1, len(prompt) // sizes.shorter)], max(2, count // (sizes.briefer * briefer)))
        for prompt, count in _of_nano()[:requests]
    )
    return _named(f"{requests} × nano", made)


@functools.cache
def _of_nano() -> list[tuple[tuple[int, ...], int]]:
    """Prompts and tokens of answers, with the random numbers of its seed, in the order in which it draws them."""
    draw = random.Random(0)
    prompts = [_drawn(draw, draw.randint(100, 1024)) for _ in range(NANO)]
    return [(prompt, draw.randint(100, 1024)) for prompt in prompts]


def poisson(sizes: Sizes, rate: float) -> Workload:
    """The same, fewer, which come at random: times between them are exponential."""
    draw, at, made = random.Random(1), 0.0, []
    for request in nano(sizes, sizes.few, 4).requests:
        made.append(replace(request, arrival=at))
        at += draw.expovariate(rate)
    return _named(f"{rate:g} requests a second", tuple(made))


def shared_prefix(sizes: Sizes) -> Workload:
    """Requests that begin with the same tokens: a prefix, and 128 tokens and an answer of 64 of its own for each."""
    draw = random.Random(2)
    prefix = _drawn(draw, sizes.prefix)
    own, count = max(2, 128 // sizes.shorter), max(2, 64 // sizes.briefer)
    made = tuple(Request((*prefix, *_drawn(draw, own)), count) for _ in range(sizes.sharers))
    return replace(_named(f"{sizes.sharers} after one prefix of {sizes.prefix:,}", made), shared=sizes.prefix)


def agent(sizes: Sizes) -> Workload:
    """Conversations: a prompt of 1,024 tokens, an answer of 128, 256 new tokens, an answer, and so on."""
    draw = random.Random(3)
    first, new, count = max(2, 1024 // sizes.shorter), max(2, 256 // sizes.shorter), max(2, 128 // sizes.briefer)
    made = tuple(
        Request(_drawn(draw, first), count, turns=tuple(_drawn(draw, new) for _ in range(sizes.turns - 1)))
        for _ in range(sizes.conversations)
    )
    return _named(f"{sizes.conversations} conversations of {sizes.turns} turns", made)


def batch(prompts: Sequence[Sequence[int]], count: int) -> Workload:
    """Prompts that come at once, with answers of one length."""
    made = tuple(Request(tuple(prompt), count) for prompt in prompts)
    return _named(f"batch {len(made)}", made)


def _named(what: str, requests: tuple[Request, ...]) -> Workload:
    found = Workload("", requests)
    return replace(found, says=f"{what}: {found.prompt_tokens:,} tokens in, {found.output_tokens:,} out")


def _drawn(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randint(0, VOCAB) for _ in range(count))
