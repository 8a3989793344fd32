"""Text to tokens and back, by Hugging Face's tokenizers; prompts of chats."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewise.core.errors import InputError, shown
from tilewise.core.optional import importing
from tilewise.engine import chat_template
from tilewise.engine.detokenizer import Detokenizer, StopStrings, checked_id

__all__ = ["Detokenizer", "StopStrings", "Tokenizer"]

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A tokenizer of the package `tokenizers`, with what a model's folder says about its use.

    Args:
        backend: a `tokenizers.Tokenizer`.
        config: the entries of tokenizer_config.json: names of special tokens, add_bos_token, add_eos_token.
        templates: chat templates by name; "default" is the one for plain chats.
        eos_ids: tokens that end a text, besides the tokenizer's own eos_token.

    Attributes:
        vocab_size: tokens with an id, added ones included. A model may have more rows than that.
        bos_id, eos_id, pad_id: ids of these tokens, or None.
        eos_ids: every token that ends a text.
        special_ids: tokens that `decode` leaves out.

    Example:
        >>> from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers
        >>> alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        >>> backend = Backend(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
        >>> backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        >>> backend.decoder = decoders.ByteLevel()
        >>> tokenizer = Tokenizer(backend)
        >>> tokenizer.decode(tokenizer.encode("naïve"))
        'naïve'
    """

    def __init__(
        self,
        backend: Any,
        *,
        config: Mapping[str, Any] | None = None,
        templates: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.backend = backend
        self._config = dict(config or {})
        self._templates = dict(templates or {})
        backend.no_padding()
        backend.no_truncation()
        self.vocab_size: int = backend.get_vocab_size()
        self.bos_id, self.eos_id, self.pad_id = map(self._named_id, ("bos_token", "eos_token", "pad_token"))
        own = () if self.eos_id is None else (self.eos_id,)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos_ids, *own)))
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(number for number, token in added.items() if token.special)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a model's folder: tokenizer.json, tokenizer_config.json, chat templates, and the tokens
        that end a text from generation_config.json, else config.json.

        Raises:
            InputError: no tokenizer.json, or a file that cannot be read.
            MissingExtraError: no package `tokenizers`.
        """
        with importing("tokenizers>=0.20", "engine", name="Tokenizer"):
            from tokenizers import Tokenizer as Backend
        path = pathlib.Path(folder)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise InputError(
                "folder",
                got=f"{path}, which has no tokenizer.json",
                expected="a model's folder with tokenizer.json",
                hint="save the tokenizer with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as wrong:  # the package raises plain Exceptions
            raise InputError(
                "tokenizer.json",
                got=f"{file}: {wrong}",
                expected="a file that the package tokenizers reads",
                hint="update tokenizers, or download the file anew",
            ) from wrong
        config = {**_json(path / "special_tokens_map.json"), **_json(path / "tokenizer_config.json")}
        ends = _json(path / "generation_config.json").get("eos_token_id")
        if ends is None:
            ends = _json(path / "config.json").get("eos_token_id")
        return cls(
            backend,
            config=config,
            templates=chat_template.read_templates(path, config),
            eos_ids=() if ends is None else [ends] if isinstance(ends, int) else ends,
        )

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text.

        `special` adds what tokenizer.json's post-processor adds; and bos_token and eos_token, where they are missing,
        if tokenizer_config.json has `add_bos_token` and `add_eos_token`, as transformers 4 read it.

        Raises InputError where `text` is no string of Unicode characters.
        """
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=special).ids
        except (TypeError, UnicodeEncodeError) as wrong:
            raise InputError(
                "text", got=f"{shown(text)} ({wrong})", expected="a string without lone surrogates", hint="give a str"
            ) from wrong
        if special and self._config.get("add_bos_token") and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if special and self._config.get("add_eos_token") and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids = [*ids, self.eos_id]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of tokens; those without a text, as a model's unused rows, add nothing.

        Raises InputError where an id is no integer from 0.
        """
        listed = [checked_id(number) for number in ids]
        text: str = self.backend.decode(listed, skip_special_tokens=skip_special)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a chat, by the model's own template.

        Args:
            messages: dicts with `role` and `content`, in order.
            add_generation_prompt: end with what begins the assistant's answer.
            tools: JSON schemas of functions that the model may call.
            variables: what else the template knows, such as `enable_thinking`.

        Returns:
            The text, special tokens included: encode it with `special=False`, or call `encode_chat`.

        Raises:
            InputError: no chat template; a bad role; a message without content; what the template refuses.
            MissingExtraError: no package `jinja2`.
        """
        named = {name: self._named(name) for name in _NAMED if self._named(name) is not None}
        return chat_template.render(
            self._templates,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables={**named, **variables},
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The tokens of `apply_chat_template`."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, tools, **variables), special=False)

    def _named(self, name: str) -> str | None:
        token = self._config.get(name)
        return token.get("content") if isinstance(token, dict) else token

    def _named_id(self, name: str) -> int | None:
        token = self._named(name)
        number: int | None = None if token is None else self.backend.token_to_id(token)
        return number


def _json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a file, or an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as wrong:
        raise InputError(
            path.name, got=f"{path}: {wrong}", expected="a file of JSON", hint="download the file anew"
        ) from wrong
    return read if isinstance(read, dict) else {}
