"""The text of an answer as its tokens come: what is certain is shown, what may become a stop string is not yet."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.engine.detokenizer import Detokenizer, StopStrings
from tilewise.engine.params import SamplingParams
from tilewise.engine.tokenizer import Tokenizer


class Text:
    """Text from tokens, up to a stop string.

    Args:
        tokenizer: of the model; None shows no text.
        params: stop strings, and what the text holds.
        prompt: text or tokens that it begins with where `params.echo`.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt: str | Sequence[int]) -> None:
        self._params = params
        self._stream = None if tokenizer is None else Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop) if params.stop else None
        self.shown = ""
        if params.echo and tokenizer is not None:
            self.shown = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, params.skip_special_tokens)

    def push(self, token: int, *, may_stop: bool) -> str | None:
        """Add a token; returns the stop string that it completes, if it `may_stop` the answer."""
        return self._add("" if self._stream is None else self._stream.push([token]), may_stop)

    def end(self) -> None:
        """No token follows: show what was held back."""
        if self._stream is not None and (self._stops is None or self._stops.found is None):
            self._add(self._stream.flush(), may_stop=True)
            self.shown += "" if self._stops is None else self._stops.flush()

    def _add(self, text: str, may_stop: bool) -> str | None:
        if self._stops is None or not may_stop:
            self.shown += text
            return None
        self.shown += self._stops.push(text)[0]
        return self._stops.found
