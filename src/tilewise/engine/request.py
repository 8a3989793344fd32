"""A request, its samples, and what a caller is told of them."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tilewise.engine.pages import Held
from tilewise.engine.params import SamplingParams


class State(Enum):
    """Where a sample is."""

    WAITING = "waiting"  # for pages, or for the budget of a step; one that was preempted waits again
    RUNNING = "running"  # has pages and a slot
    FINISHED = "finished"


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities at one position, of the distribution before temperature and filters.

    Attributes:
        token: the one that stands there.
        logprob: its own.
        top: of the most likely tokens, most likely first.

    Example:
        >>> found = tw.engine.Logprob(token=7, logprob=-0.1, top={7: -0.1, 3: -2.5})
        >>> max(found.top, key=found.top.get)
        7
    """

    token: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class Completion:
    """One answer so far.

    Attributes:
        index: which of the request's `n`.
        text: all of it; what may still become a stop string is held back.
        token_ids: all of its tokens.
        finish_reason: None while it goes on; "stop", "length", "abort" or "error".
        stop_reason: the stop string or token that ended it, None for the model's own end.
        seed: with which it was sampled.
        logprobs: one for each token, if asked for.
        error: what went wrong where the reason is "error".
        lossy: whether proposed tokens were kept that plain decoding would not give (`Speculation.rule`).

    Example:
        >>> answer = tw.engine.Completion(0, " Paris.", [7042, 30], "stop", None, seed=7, logprobs=None)
        >>> answer.text
        ' Paris.'
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    seed: int
    logprobs: list[Logprob] | None
    error: str | None = None
    lossy: bool = False


@dataclass(frozen=True)
class RequestOutput:
    """What a step gave for a request.

    Attributes:
        request_id: as `Engine.add` returned it.
        prompt: its text, None where tokens were given.
        prompt_token_ids: its tokens.
        outputs: its answers, in the order of their index.
        finished: whether all of them have ended.
        prompt_logprobs: one for each token of the prompt but the first, if asked for.
        cached_tokens: tokens of the prompt whose keys and values were found in the prefix cache.

    Example:
        >>> answer = tw.engine.Completion(0, " Paris.", [7042, 30], "stop", None, seed=7, logprobs=None)
        >>> output = tw.engine.RequestOutput("a", "The capital of France is", [504, 3575], [answer], True, None, 0)
        >>> output.prompt + output.outputs[0].text
        'The capital of France is Paris.'
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    finished: bool
    prompt_logprobs: list[Logprob] | None
    cached_tokens: int


@dataclass(eq=False)
class Sample:
    """One answer to a request, and how far it is; the engine's, nobody else's.

    `tokens` are known to the host. Up to `launched` of them, counted with those that steps under way will give, are
    spoken for: the host plans a step before it knows what the last one gave.
    """

    request: Request
    index: int
    seed: int
    tokens: list[int]
    state: State = State.WAITING
    sequence: Held | None = None
    slot: int = -1
    computed: int = 0  # tokens whose keys and values are written, or are by a step under way or planned
    written: int = 0  # the same of steps that were launched
    launched: int = 0
    seated: int = -1  # the turn in which its tokens were sent to its slot
    turn: int = 0  # grows when it is preempted: what older steps give does not count
    text: Any = None  # what turns tokens into text
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    lossy: bool = False  # whether it has tokens that a lossy rule has kept

    @property
    def order(self) -> tuple[int, int, int]:
        """Its place among all samples: by priority, then by arrival, which preemption does not change."""
        return self.request.priority, self.request.number, self.index

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.tokens)

    @property
    def output_tokens(self) -> list[int]:
        """Those that came."""
        return self.tokens[self.prompt_length :]

    @property
    def most(self) -> int:
        """Tokens, the prompt's included, that it may come to have."""
        return self.request.most

    @property
    def certain(self) -> int:
        """Tokens that need not be computed anew if nothing comes of steps under way."""
        found = min(self.written, len(self.tokens) - 1)
        logprobs = len(self.request.prompt_logprobs)
        if self.request.params.prompt_logprobs is None or self.index or logprobs == self.prompt_length - 1:
            return found
        return min(found, logprobs)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.launched - self.computed

    def completion(self) -> Completion:
        """What a caller sees."""
        params = self.request.params
        return Completion(
            self.index,
            self.text.shown if self.text is not None else "",
            self.output_tokens,
            self.finish_reason,
            self.stop_reason,
            self.seed,
            list(self.logprobs) if params.logprobs is not None else None,
            self.error,
            self.lossy,
        )


_NUMBERS = itertools.count()


@dataclass(eq=False)
class Request:
    """A prompt with its parameters; `samples` are its answers."""

    request_id: str
    prompt: str | None
    tokens: list[int]
    params: SamplingParams
    most: int
    priority: int = 0
    number: int = field(default_factory=lambda: next(_NUMBERS))
    samples: list[Sample] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_logprobs: list[Logprob] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether no answer goes on."""
        return all(sample.state is State.FINISHED for sample in self.samples)

    def output(self) -> RequestOutput:
        """What a caller sees."""
        asked = self.params.prompt_logprobs is not None
        return RequestOutput(
            self.request_id,
            self.prompt,
            list(self.tokens),
            [sample.completion() for sample in self.samples],
            self.finished,
            list(self.prompt_logprobs) if asked else None,
            self.cached_tokens,
        )


def seed_of(seed: int, index: int) -> int:
    """The seed of a request's answer `index`: the request's own for the first, else derived from both."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
