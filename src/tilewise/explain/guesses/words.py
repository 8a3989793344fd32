"""The text of the example: words whose letters follow from the first one. Which word comes next is drawn.

Letter j of word a is token a * letters + j. So `letters` - 1 tokens of a word are certain once its first is known, and
the first one is not: easy places and hard ones, as in real text, but countable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tilewise.core.errors import InputError
from tilewise.explain.guesses.table_model import TableModel, plain, uniforms

TABLES = 2**32  # positions of the noise from which tables are made; no text is as long


def spelled(words: int, letters: int, *, table: int = 0, temperature: float = 1.0, seed: int = 0) -> TableModel:
    """A model that writes words.

    Two marks are tokens as well. After OUTLINE = words * letters the model writes first letters alone; after POINT =
    OUTLINE + 1 it spells again. It never writes a mark itself.

    Args:
        words: of the vocabulary.
        letters: of a word.
        table: of several models that spell alike, each has its own view of which word follows.
        temperature: 0 takes the likeliest word.
        seed: of the noise.

    Returns:
        The model.

    Example:
        >>> from tilewise.explain.guesses.table_model import plain
        >>> from tilewise.explain.guesses.words import spelled
        >>> plain(spelled(8, 4), [4], 3)  # word 1 is spelled 4 5 6 7
        [5, 6, 7]
    """
    tokens = words * letters
    first, outline = np.arange(words) * letters, tokens + words  # the state of outline without a word yet
    follow = 2 * uniforms(table, TABLES, 2 * words * words).reshape(2, words, words)
    logits = np.full((outline + 2, tokens + 2), -np.inf)
    logits[np.arange(tokens), np.arange(tokens) + 1] = 0.0
    logits[first + letters - 1] = -np.inf
    logits[np.ix_(first + letters - 1, first)] = follow[0]
    logits[np.ix_(tokens + np.arange(words), first)] = follow[1]  # in an outline, after a word
    logits[outline:, first] = 0.0  # after a mark
    moves = np.tile(np.arange(tokens + 2), (len(logits), 1))  # a letter is its own state
    moves[:, tokens], moves[:, tokens + 1] = outline, outline + 1
    moves[tokens : outline + 1, first] = tokens + np.arange(words)
    return TableModel(logits, moves, temperature=temperature, seed=seed)


def forget(model: TableModel, words: Iterable[int], letters: int) -> TableModel:
    """A model that stutters in some words: it repeats a letter where it should write the next one, which is wrong.

    Args:
        model: one that `spelled` made.
        words: that it forgets, and with them what follows them.
        letters: of a word.

    Returns:
        Another model.

    Example:
        >>> from tilewise.explain.guesses.table_model import plain
        >>> from tilewise.explain.guesses.words import forget, spelled
        >>> plain(forget(spelled(8, 4), [1], 4), [4], 3)
        [4, 4, 4]
    """
    logits = model.logits.copy()
    for letter in (word * letters + n for word in words for n in range(letters)):
        logits[letter], logits[letter, letter] = -np.inf, 0.0
    return TableModel(logits, model.moves, temperature=model.temperature, seed=model.seed)


@dataclass(frozen=True)
class Scene:
    """A prompt, and the answer that plain decoding gives: `count` times the rest of a word and the next first letter.

    Args:
        words: of the vocabulary, at least 2. The prompt has half of them.
        letters: of a word, at least 3.
        count: of words in the answer.
        temperature: 0 takes the likeliest word.
        seed: of the noise.

    Raises:
        InputError: a number is too small.

    Example:
        >>> from tilewise.explain.guesses.words import Scene
        >>> scene = Scene(words=4, letters=3, count=2)
        >>> scene.prompt, len(scene.answer), scene.answer[:2]  # the rest of word 0
        ([3, 4, 5, 0, 1, 2, 0], 6, [1, 2])
    """

    words: int = 8
    letters: int = 4
    count: int = 24
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("words", 2), ("letters", 3), ("count", 1), ("temperature", 0), ("seed", 0)):
            if getattr(self, name) < least:
                got = getattr(self, name)
                raise InputError(name, got=got, expected=f"at least {least}", hint="leave it out for the default")

    def target(self, table: int = 0) -> TableModel:
        """A model that has computed nothing yet.

        Args:
            table: 0 is the target, others are models that spell alike but follow words by other ones.

        Returns:
            The model.
        """
        return spelled(self.words, self.letters, table=table, temperature=self.temperature, seed=self.seed)

    @property
    def tokens(self) -> int:
        """Of the answer."""
        return self.count * self.letters

    @property
    def prompt(self) -> list[int]:
        """Half of the words, and the first letter of word 0."""
        return [*(w * self.letters + n for w in reversed(range(self.words // 2)) for n in range(self.letters)), 0]

    @cached_property
    def answer(self) -> list[int]:
        """Of plain decoding."""
        return plain(self.target(), self.prompt, self.tokens)

    @cached_property
    def firsts(self) -> list[int]:
        """The words of the answer: the one that the prompt begins, and those of which the answer has more than one
        letter.
        """
        letters = [self.prompt[-1], *self.answer[self.letters - 1 :: self.letters]]
        return [letter // self.letters for letter in letters[: self.count]]

    def texts(self) -> Sequence[list[int]]:
        """The text before each token of the answer.

        Returns:
            A list of tokens for each.
        """
        whole = [*self.prompt, *self.answer]
        return [whole[: len(self.prompt) + n] for n in range(self.tokens)]
