"""A GGUF file's tokenizer as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from tilewise.core.errors import InputError, UnsupportedError
from tilewise.core.optional import importing

_CONTROL, _USER_DEFINED = 3, 4  # token types
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PREFIX = "tokenizer.ggml."


def write_tokenizer(fields: Mapping[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Write both files, with the chat template.

    Args:
        fields: the GGUF file's metadata.
        folder: where to write.

    Returns:
        bos_token_id, eos_token_id and pad_token_id, as far as the file has them, for config.json.

    Raises:
        UnsupportedError: another tokenizer than byte-level BPE, or an unknown pre-tokenizer.
        InputError: a part that is missing.
        MissingExtraError: no package `tokenizers`.
    """
    with importing("tokenizers>=0.20", "engine", name="GGUF tokenizer"):
        from tokenizers import AddedToken, decoders, models, processors
        from tokenizers import Tokenizer as Backend
    entries = {key.removeprefix(_PREFIX): value for key, value in fields.items() if key.startswith(_PREFIX)}
    if entries.get("model") != "gpt2":
        raise UnsupportedError(
            "GGUF tokenizer",
            got=f"{_PREFIX}model = {entries.get('model')}",
            expected="gpt2 (byte-level BPE)",
            hint="take the model's original Hugging Face folder",
        )
    if missing := [key for key in ("tokens", "token_type", "merges") if not isinstance(entries.get(key), list)]:
        raise InputError(
            "GGUF tokenizer",
            got=f"no {', '.join(_PREFIX + key for key in missing)}",
            expected="tokens, their types and merges",
            hint="convert the model anew",
        )
    tokens, before = entries["tokens"], entries.get("pre")
    numbers = {name: entries.get(key) for name, key in _IDS.items()}
    try:
        named = {name: tokens[number] for name, number in numbers.items() if number is not None}
        added = list(zip(tokens, entries["token_type"], strict=True))
        model = models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in entries["merges"]],
            ignore_merges=before == "llama-bpe",
        )
    except Exception as wrong:  # the package raises plain Exceptions
        raise InputError(
            "GGUF tokenizer",
            got=f"{type(wrong).__name__}: {wrong}",
            expected="merges, types and ids of tokens that are there",
            hint="download the file anew",
        ) from wrong
    backend = Backend(model)
    backend.pre_tokenizer = _pre_tokenizer(before, bool(entries.get("add_space_prefix", False)))
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        backend.add_tokens(
            [AddedToken(token, special=special, normalized=False) for token, found in added if found == kind]
        )
    first = entries.get("add_bos_token", before == "llama-bpe") and "bos_token" in named
    if first:
        token = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{token} $A",
            pair=f"{token} $A {token}:1 $B:1",
            special_tokens=[(token, numbers["bos_token"])],
        )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "add_bos_token": bool(first),
        "model_max_length": fields.get(f"{fields.get('general.architecture')}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(fields.get("tokenizer.chat_template"), str):
        config["chat_template"] = fields["tokenizer.chat_template"]
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    ends: dict[str, Any] = {
        f"{name}_id": numbers[name] for name in ("bos_token", "eos_token", "pad_token") if numbers[name] is not None
    }
    turn = entries.get("eot_token_id")  # a chat's turns may end with a token of their own
    if turn is not None and turn != numbers["eos_token"]:
        ends["eos_token_id"] = [number for number in (numbers["eos_token"], turn) if number is not None]
    return ends


_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _pre_tokenizer(name: str | None, space: bool) -> Any:
    """How text is cut before BPE, by llama.cpp's name for it."""
    from tokenizers import Regex, pre_tokenizers

    if name == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=space)]
        )
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=space)
    if name == "llama-bpe":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False),
            ]
        )
    raise UnsupportedError(
        "GGUF tokenizer",
        got=f"{_PREFIX}pre = {name}",
        expected="smollm, gpt-2 or llama-bpe",
        hint="take the model's original Hugging Face folder",
    )
