"""A language model as small as two tables, and the check that all guesses go through.

`forward` is the only thing that costs: a forward computes any number of rows at once, and is counted once. A row is a
text; it gives the token that the model chooses after that text. Noise is keyed by (seed, position), so this token
depends on the text alone, not on the forward that computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.core.errors import InputError

Array = npt.NDArray[np.float64]
States = npt.NDArray[np.int64]


@lru_cache(4096)
def uniforms(seed: int, position: int, count: int) -> Array:
    """Numbers between 0 and 1, a function of the three arguments."""
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(count)
    return np.asarray(((bits >> np.uint64(11)) + 0.5) / 2**53)


class Output(NamedTuple):
    """What a row gives: the token that the model chooses after the row's text, and its state there (its feature)."""

    token: int
    state: int


class TableModel:
    """A model whose state is a number: one table has the logits of each state, the other the state after each token.

    Args:
        logits: (states, vocabulary), of the next token; -inf for one that cannot come.
        moves: int64 (states, vocabulary), the state after each token. A text begins in state 0.
        temperature: 0 takes the likeliest token, otherwise one is drawn.
        seed: of the noise, at least 0.

    Raises:
        InputError: tables of different shapes, or a temperature below 0.

    Source: a draw is an argmax with Gumbel noise, Maddison, Tarlow and Minka, "A* Sampling", 2014.

    Example:
        >>> import numpy as np
        >>> from tilewise.explain.guesses.table_model import TableModel
        >>> counter = TableModel(np.eye(4)[[1, 2, 3, 0]], np.tile(np.arange(4), (4, 1)), temperature=0)
        >>> [row.token for row in counter.forward([[0], [0, 1], [3]])], counter.forwards, counter.rows
        ([1, 2, 0], 1, 3)
    """

    def __init__(self, logits: Array, moves: States, *, temperature: float = 1.0, seed: int = 0) -> None:
        if logits.shape != moves.shape:
            got = f"{logits.shape} and {moves.shape}"
            raise InputError("logits, moves", got=got, expected="one shape", hint="(states, vocabulary)")
        if temperature < 0:
            raise InputError("temperature", got=temperature, expected="at least 0", hint="0 takes the likeliest token")
        self.logits, self.moves, self.temperature, self.seed = logits, moves, temperature, seed
        self.forwards = self.rows = 0

    def forward(self, texts: Sequence[Sequence[int]]) -> list[Output]:
        """Compute rows, all in one forward, which is counted.

        Args:
            texts: of the rows. (A real model has keys and values of what they begin with alike, and reads those.)

        Returns:
            An `Output` for each row.
        """
        self.forwards += 1
        self.rows += len(texts)
        states = [self.state(text) for text in texts]
        return [Output(self.choose(state, len(text)), state) for state, text in zip(states, texts, strict=True)]

    def state(self, text: Sequence[int]) -> int:
        """The state after a text, not counted: for who checks or trains, not for who decodes.

        Args:
            text: its tokens.

        Returns:
            The state's number.
        """
        state = 0
        for token in text:
            state = int(self.moves[state, token])
        return state

    def choose(self, state: int, position: int) -> int:
        """The token that follows a state: the output layer alone, which is not counted.

        Args:
            state: after the text.
            position: of the token, the length of the text.

        Returns:
            The token.
        """
        if self.temperature == 0:
            return int(self.logits[state].argmax())
        noise = -np.log(-np.log(uniforms(self.seed, position, self.logits.shape[1])))
        return int((self.logits[state] / self.temperature + noise).argmax())

    @property
    def probabilities(self) -> Array:
        """Of the next token in each state, (states, vocabulary)."""
        if self.temperature == 0:
            return np.asarray(np.eye(self.logits.shape[1])[self.logits.argmax(1)])
        p = np.exp((self.logits - self.logits.max(1, keepdims=True)) / self.temperature)
        return np.asarray(p / p.sum(1, keepdims=True))


class Verified(NamedTuple):
    """What a forward gives: emitted tokens, the state before the last of them, and the tokens chosen `beside` them."""

    tokens: list[int]
    state: int
    beside: list[int]


def verify(
    model: TableModel, text: Sequence[int], guesses: Sequence[Sequence[int]], beside: Sequence[Sequence[int]] = ()
) -> Verified:
    """Check guesses of what follows a text, in one forward; what is emitted is plain decoding's, whatever they are.

    The rows are a tree: the text itself (the root), and the text with each beginning of each guess; beginnings that are
    equal share a row. From the root, follow the token that the model chose as long as it was guessed.

    Args:
        model: the target.
        text: all tokens so far; the last one is emitted but not computed yet.
        guesses: continuations.
        beside: other texts to compute in the same forward.

    Returns:
        `Verified`: the accepted guesses and the token after them, at least one token in all.

    Example:
        >>> import numpy as np
        >>> from tilewise.explain.guesses.table_model import TableModel, verify
        >>> counter = TableModel(np.eye(4)[[1, 2, 3, 0]], np.tile(np.arange(4), (4, 1)), temperature=0)
        >>> verify(counter, [0], [[1, 3], [1, 2, 2]]).tokens, counter.forwards, counter.rows
        ([1, 2, 3], 1, 5)
    """
    rows = list(dict.fromkeys([(), *(tuple(guess[:n]) for guess in guesses for n in range(1, len(guess) + 1))]))
    outputs = model.forward([*([*text, *row] for row in rows), *beside])
    at = dict(zip(rows, outputs, strict=False))
    path: tuple[int, ...] = ()
    while (*path, at[path].token) in at:
        path = (*path, at[path].token)
    return Verified([*path, at[path].token], at[path].state, [row.token for row in outputs[len(rows) :]])


def plain(model: TableModel, prompt: Sequence[int], count: int) -> list[int]:
    """Plain decoding: a forward for each token.

    Args:
        model: the target.
        prompt: at least one token.
        count: of tokens to emit.

    Returns:
        The tokens.

    Example:
        >>> import numpy as np
        >>> from tilewise.explain.guesses.table_model import TableModel, plain
        >>> counter = TableModel(np.eye(4)[[1, 2, 3, 0]], np.tile(np.arange(4), (4, 1)), temperature=0)
        >>> plain(counter, [2], 3), counter.forwards
        ([3, 0, 1], 3)
    """
    text = [*prompt]
    while len(text) < len(prompt) + count:
        text += verify(model, text, []).tokens
    return text[len(prompt) :]


def chain_forwards(right: Sequence[bool], length: int) -> int:
    """Forwards with one chain of guesses, if it is known at which places a guess is right.

    A run of right places ends with a wrong one, where the target's own token is emitted. A forward emits `length` + 1
    tokens of a run, or what is left of it, so a run of r places takes ceil(r / (length + 1)) forwards.

    Args:
        right: for each token of the answer.
        length: guesses in a forward.

    Returns:
        The number of forwards.

    Example:
        >>> from tilewise.explain.guesses.table_model import chain_forwards
        >>> chain_forwards([True, True, True, False, True, True], length=2)
        3
    """
    runs = [0]
    for ok in right:
        runs[-1] += 1
        runs += [] if ok else [0]
    return sum(-(-run // (length + 1)) for run in runs)
