"""Text from a stream of tokens, and stop strings in it."""

from __future__ import annotations

import codecs
import functools
import json
import operator
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tilewise.core.errors import InputError, UnsupportedError, shown

if TYPE_CHECKING:
    from tilewise.engine.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """The text of tokens that come one by one: together, what `Tokenizer.decode` makes of all of them.

    A character is held back until all of its bytes are there. Work per token does not grow with the text. Bytes that
    are no UTF-8 become U+FFFD. (Where a tokenizer falls back to tokens for bytes, `decode` shows U+FFFD for every
    character of a run with such a byte; here, characters that were complete before it stay.)

    Args:
        tokenizer: whose tokens these are.
        skip_special: leave out special tokens.

    Raises:
        UnsupportedError: a decoder of bytes with other steps beside it, as no known model has.

    Example:
        >>> from tilewise.engine.tokenizer import Tokenizer
        >>> from tokenizers import Tokenizer as Backend, decoders, models
        >>> backend = Backend(models.BPE(vocab={"Ã": 0, "©": 1}, merges=[]))  # the bytes C3 A9: é
        >>> backend.decoder = decoders.ByteLevel()
        >>> stream = Detokenizer(Tokenizer(backend))
        >>> stream.push([0]), stream.push([1]), stream.push([0]), stream.flush()
        ('', 'é', '', '\ufffd')
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._backend = tokenizer.backend
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        steps = _decoder_steps(tokenizer.backend.decoder)
        self._byte_level = steps == ["ByteLevel"]
        if "ByteLevel" in steps and not self._byte_level:
            raise UnsupportedError(
                "Detokenizer",
                got=f"a tokenizer whose decoder has the steps {steps}",
                expected="ByteLevel alone, or steps without it",
                hint="decode all tokens at once, by Tokenizer.decode",
            )
        self._byte_fallback = "ByteFallback" in steps
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = b""  # of tokens for bytes: a character's first ones
        self._before: list[int] = []  # the last token: decoders look no further back

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens add. Raises InputError where an id is no integer from 0."""
        return "".join([self._next(checked_id(number)) for number in ids])

    def flush(self) -> str:
        """What is still held back: U+FFFD for a character that was not finished, else nothing."""
        if self._byte_level:
            return self._utf8.decode(b"", final=True)
        held, self._pending = "\ufffd" * len(self._pending), b""
        return held

    def _next(self, number: int) -> str:
        token = self._backend.id_to_token(number)
        if token is None or number in self._skipped:
            return ""
        if self._byte_level:
            letters = _byte_of_letter()
            known = all(letter in letters for letter in token)  # else an added token, which stands for itself
            return self._utf8.decode(bytes(letters[letter] for letter in token) if known else token.encode())
        before, self._before = self._before, [number]
        byte = _BYTE.fullmatch(token) if self._byte_fallback else None
        if byte:
            return self._add_byte(bytes.fromhex(byte.group(1)))
        # What a token adds depends on whether it is the first: "▁" begins a word, yet not the text.
        text: str = self._backend.decode([*before, number], skip_special_tokens=False)
        known_text = self._backend.decode(before, skip_special_tokens=False) if before else ""
        return self.flush() + text[len(known_text) :]

    def _add_byte(self, byte: bytes) -> str:
        """The characters that this byte completes, and U+FFFD for bytes that no character has there."""
        self._pending += byte
        text = ""
        while self._pending:
            try:
                text, self._pending = text + self._pending.decode(), b""
            except UnicodeDecodeError as wrong:
                if wrong.reason == "unexpected end of data":
                    break
                text, self._pending = text + "\ufffd", self._pending[1:]
        return text


class StopStrings:
    """Text until the first stop string. What may be the beginning of one is held back until that is known.

    Where several stop strings occur, the one that is complete first counts, and of these the longest. How the text is
    cut into pieces does not matter.

    Args:
        stops: a string, or several.
        include_stop: emit the stop string, too.

    Raises:
        InputError: an empty stop string, or no string.

    Example:
        >>> stops = StopStrings(["\\n\\n"])
        >>> stops.push("one\\n"), stops.push("two\\n"), stops.push("\\nthree")
        (('one', False), ('\\ntwo', False), ('', True))
    """

    def __init__(self, stops: str | Iterable[str], include_stop: bool = False) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise InputError("stops", got=shown(stop), expected="strings that are not empty", hint="leave it out")
        self._include = include_stop
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; `found` is that string."""
        return self.found is not None

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is known to come before any stop string, and whether one was found. After that, text is
        ignored.
        """
        if self.found is not None:
            return "", True
        text, self._held = self._held + text, ""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            start, stop = min(found, key=lambda place: (place[0] + len(place[1]), place[0]))
            self.found = stop
            return text[: start + len(stop) if self._include else start], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """What was held back, once no text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def checked_id(number: Any) -> int:
    """A token's id as int. Raises InputError where it is no integer from 0."""
    try:
        index = operator.index(number)
    except TypeError:
        index = -1
    if not 0 <= index < 1 << 32:
        raise InputError("ids", got=shown(number), expected="integers from 0", hint="give token ids as int")
    return index


def _decoder_steps(decoder: Any) -> list[str]:
    """The types of a decoder's steps, in order."""
    if decoder is None:
        return []
    read = json.loads(decoder.__getstate__())
    return [step["type"] for step in (read["decoders"] if read["type"] == "Sequence" else [read])]


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """The byte of each letter of byte-level BPE (Radford et al., 2019): printable bytes are their own letters."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
