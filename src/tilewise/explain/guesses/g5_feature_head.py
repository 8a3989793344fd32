"""Guess 5, a head on features (EAGLE, 2024): guess the next state and not the next token, and read the newest token.

The head takes a state and the token after it, and guesses the state after that token. The target's own output layer
makes a token of the state, and both go round again. So the head knows which word was drawn, as guesses 2 and 3 do
not; and states are smoother than tokens, so that a small head learns them. Here it has learned some pairs of a state
and a token by heart and is silent at others. An unknown pair costs the guess of one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.explain.guesses.table_model import TableModel, chain_forwards, verify
from tilewise.explain.guesses.words import Scene

TRAINED, LOSSLESS, FORMULA = "a head", True, "sum of ceil(run / (length + 1))"


def run(
    target: TableModel, prompt: Sequence[int], count: int, *, head: Mapping[tuple[int, int], int], length: int
) -> list[int]:
    """`count` tokens after the prompt."""
    text, guess = [*prompt], list[int]()
    while len(text) < len(prompt) + count:
        found = verify(target, text, [guess])
        text += found.tokens
        guess, state, token = [], found.state, text[-1]
        while len(guess) < length and (state, token) in head:
            state = head[state, token]
            token = target.choose(state, len(text) + len(guess))
            guess.append(token)
    return text[len(prompt) :][:count]


def closed_form(right: Sequence[bool], length: int) -> int:
    """Forwards, if it is known before which places of the answer the pair of state and token is a learned one."""
    return chain_forwards(right, length)


def example(scene: Scene) -> tuple[dict[str, Any], dict[str, Any]]:
    """A head that has learned all of some text of the same model."""
    target, length = scene.target(), 2 * scene.letters - 1
    target.seed += 1  # other draws
    text = [*scene.prompt]
    while len(text) < len(scene.prompt) + 4 * scene.words * scene.letters:
        text += verify(target, text, []).tokens
    pairs = [(target.state(text[:n]), text[n]) for n in range(len(text))]
    head = {(state, token): int(target.moves[state, token]) for state, token in pairs}
    right = [(target.state(x[:-1]), x[-1]) in head for x in scene.texts()]
    right[0] = False  # the first forward has no state before it to guess from
    return {"head": head, "length": length}, {"right": right, "length": length}


if __name__ == "__main__":
    from tilewise.explain.guesses import show

    show("feature_head")
