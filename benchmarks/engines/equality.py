"""Whether the engine's tokens are those of transformers, and those of each request alone, however steps are made up.

A line is one way to make steps: requests at a time, tokens of a step and of a page, prefix cache, preemption, order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tilewise.engine import Engine, EngineConfig, SamplingParams
from tilewise.engine.groups import groups_of
from tilewise.engine.models.decoder import Decoder
from tilewise.engine.request import Sample, State

CHUNKS = (16, 128, 1024, 8192)
PAGES = (1, 16, 64)
NEAR = 2.0**-6  # of a logit: bfloat16 has eight bits, and sums are taken in another order
LONGEST = 96  # tokens of a prompt
Tokens = list[int]
Asked = tuple[Tokens, SamplingParams]


@dataclass(frozen=True)
class Line:
    """One way to make steps: `batch` requests have pages at a time, a step computes `chunk` tokens at most."""

    part: str
    batch: int
    chunk: int
    page_size: int
    prefix_cache: bool
    preempted: bool
    backwards: bool = False

    @property
    def name(self) -> str:
        """All of it."""
        flags = {"prefix cache": self.prefix_cache, "preempted": self.preempted, "backwards": self.backwards}
        said = [f"{self.part}, {self.batch} at a time, steps of {self.chunk}, pages of {self.page_size}"]
        return ", ".join([*said, *(name for name, holds in flags.items() if holds)])


@dataclass(frozen=True)
class Difference:
    """Where an answer first differs, and whether two tokens were nearly as likely there; None where nobody asked."""

    request: int
    position: int
    near_tie: bool | None


def greedy_lines(requests: int) -> Iterator[Line]:
    """The whole product."""
    both = (False, True)
    for axes in itertools.product((1, requests), CHUNKS, PAGES, both, both):
        yield Line("greedy", *axes)


def sampled_lines(requests: int) -> Iterator[Line]:
    """The whole product, on pages of one size."""
    both = (False, True)
    batches = sorted({1, min(8, requests), requests})
    for batch, chunk, preempted, backwards in itertools.product(batches, CHUNKS, both, both):
        yield Line("sampled", batch, chunk, 16, True, preempted, backwards)


def covering(lines: Sequence[Line]) -> list[Line]:
    """Some of the lines, in which each two values meet that meet in all of them."""

    def pairs(line: Line) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(sorted((name, str(value)) for name, value in asdict(line).items()), 2))

    found: list[Line] = []
    left = set().union(*map(pairs, lines))
    while left:
        best = max(lines, key=lambda line: len(pairs(line) & left))
        found.append(best)
        left -= pairs(best)
    return found


def prompts(requests: int, vocab: int) -> list[Tokens]:
    """Random tokens; every fourth prompt begins as the one before it."""
    draw, made = random.Random(0), list[Tokens]()
    for number in range(requests):
        tokens = [draw.randrange(vocab) for _ in range(draw.randint(1, LONGEST))]
        made.append(made[-1][: LONGEST // 2] + tokens[: LONGEST // 2] if number % 4 == 3 else tokens)
    return made


def greedy(asked: Sequence[Tokens], count: int) -> list[Asked]:
    """Greedy requests."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [(tokens, params) for tokens in asked]


def sampled(asked: Sequence[Tokens], count: int, vocab: int) -> list[Asked]:
    """Requests at three temperatures, with all processors, then with each alone, then with none."""
    stop = {"min_tokens": count // 2, "stop_token_ids": list(range(0, vocab, 9))}
    alone: list[dict[str, Any]] = [
        {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.5},
        {"frequency_penalty": 0.3}, {"logit_bias": {3: 4.0, 5: -2.0}}, {"bad_token_ids": [4, 6]},
        {"allowed_token_ids": list(range(0, vocab, 2))}, stop,
    ]  # fmt: skip
    together = {name: value for each in alone for name, value in each.items()}
    kinds = [together, *alone, {}]
    return [
        (tokens, SamplingParams(temperature=(0.5, 1.0, 1.5)[n % 3], seed=n, max_tokens=count, ignore_eos=True,
                                **kinds[n // 3 % len(kinds)]))
        for n, tokens in enumerate(asked)
    ]  # fmt: skip


def answers(decoder: Decoder, line: Line, asked: Sequence[Asked], *, deterministic: bool = False) -> list[Tokens]:
    """What the engine answers, in the order of the requests."""
    longest = max(len(tokens) + (params.max_tokens or 0) for tokens, params in asked)
    pages = (-(-longest // line.page_size) + 1) * len(groups_of(decoder.config.windows))
    config = EngineConfig(
        max_model_len=longest + 1, page_size=line.page_size, max_batch_tokens=line.chunk, max_running=line.batch,
        prefix_cache=line.prefix_cache, deterministic=deterministic, num_pages=pages * (line.batch + 1),
    )  # fmt: skip
    engine = Engine(decoder, config=config)
    order = range(len(asked))[:: -1 if line.backwards else 1]
    names = {engine.add(*asked[n]): n for n in order}
    found: list[Tokens] = [[] for _ in asked]
    lengths: dict[Sample, int] = {}  # when they last lost their pages
    while engine.has_unfinished:
        for output in engine.step():
            found[names[output.request_id]] = output.outputs[0].token_ids
        if line.preempted:
            _preempt(engine, lengths)
    return found


def _preempt(engine: Engine, lengths: dict[Sample, int]) -> None:
    """Take the pages of the sample that has them for longest, of those with a new token since then: each gets on."""
    engine._drain()
    for sample in list(engine.scheduler.running):
        if sample.state is State.RUNNING and len(sample.tokens) > lengths.get(sample, sample.prompt_length):
            lengths[sample] = len(sample.tokens)
            return engine.scheduler.preempt(sample)
    return None


def of_transformers(model: Any, asked: Sequence[Tokens], count: int) -> Iterator[Tokens]:
    """What transformers' generate gives after each prompt alone."""
    for tokens in asked:
        given = torch.tensor([tokens], device=model.device)
        found = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        yield found[0, len(tokens) :].tolist()


def near_tie(model: Any, tokens: Tokens) -> bool:
    """Whether two tokens are nearly as likely after these ones, for a model of transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens], device=model.device), logits_to_keep=1).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return bool(first - second < NEAR * abs(first))


def compared(
    found: Sequence[Tokens], want: Sequence[Tokens], nearly: Callable[[int, int], bool] | None = None
) -> list[Difference]:
    """The answers that differ; `nearly` says of a request and a position whether two tokens were nearly as likely."""
    differences = []
    for n, (one, other) in enumerate(zip(found, want, strict=True)):
        if one != other:
            position = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            at = min(len(one), len(other)) if position is None else position
            differences.append(Difference(n, at, None if nearly is None else nearly(n, at)))
    return differences
