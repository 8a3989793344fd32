"""A model that answers prompts: the engine behind one class."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilewise.core.errors import InputError
from tilewise.engine.config import EngineConfig
from tilewise.engine.engine import Engine
from tilewise.engine.interrupts import Interrupts
from tilewise.engine.models.load import RANDOM, decoder_of, folder_of
from tilewise.engine.params import SamplingParams
from tilewise.engine.request import RequestOutput
from tilewise.engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model of Hugging Face's format, which answers many prompts at a time.

    Args:
        model: its folder, with config.json, *.safetensors and tokenizer.json; "smollm2", a small one that is fetched on
            first use; or "random:NAME", random weights of a published shape, whose prompts are lists of tokens.
        dtype: "float32", "float16" or "bfloat16"; "auto" is the checkpoint's on a GPU, and float32 on a CPU.
        device: where it runs; None is a GPU if there is one.
        options: fields of `EngineConfig`, such as max_model_len, memory, kv_encoding and prefix_cache.

    Raises:
        InputError: a folder without what is needed, or an option out of range.
        UnsupportedError: an architecture, or a part of a config, that is not known.
        MissingExtraError: packages of the extra `engine` are missing.

    Example:
        >>> from tilewise.engine import LLM, SamplingParams
        >>> llm = LLM("smollm2", max_model_len=1024)  # doctest: +SKIP
        >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0.0))  # doctest: +SKIP
    """

    def __init__(
        self, model: str | Path, *, dtype: str = "auto", device: torch.device | str | None = None, **options: Any
    ) -> None:
        random = isinstance(model, str) and model.startswith(RANDOM)
        found = model if random else folder_of(model)
        unknown = sorted(options.keys() - EngineConfig.__dataclass_fields__.keys())
        if unknown:
            expected = ", ".join(EngineConfig.__dataclass_fields__)
            raise InputError("LLM", got=f"{unknown[0]}=", expected=expected, hint="see tilewise.engine.EngineConfig")
        decoder = decoder_of(found, dtype=dtype, device=device)
        self.engine = Engine(decoder, None if random else Tokenizer.read(found), EngineConfig(**options))
        self.name = Path(found).name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's.

        Raises:
            InputError: random weights have none.
        """
        if self.engine.tokenizer is None:
            hint = "give prompts as lists of tokens to `generate`"
            raise InputError("tokenizer", got="random weights", expected="a model with one", hint=hint)
        tokenizer: Tokenizer = self.engine.tokenizer
        return tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer prompts, all at a time; each answer is the same as if its prompt were alone.

        Args:
            prompts: texts or lists of tokens; one, or several.
            params: for all prompts, or one for each.

        Returns:
            One output for each prompt, in their order.

        Raises:
            InputError: a prompt or parameters that cannot be; then nothing runs.
        """
        listed = _listed(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(listed)
        if len(each) != len(listed):
            hint = "one for each prompt, or one for all"
            raise InputError("params", got=f"{len(each)}", expected=f"{len(listed)}", hint=hint)
        names = [secrets.token_hex(8) for _ in listed]
        try:
            for name, prompt, own in zip(names, listed, each, strict=True):
                self.engine.add(prompt, own, request_id=name)
            return self._answers(names)
        except BaseException:  # Ctrl-C too: nothing of these requests stays
            with Interrupts():
                for name in names:
                    self.engine.abort(name)
                self.engine.advance()
            raise

    def chat(
        self, messages: Messages | Sequence[Messages], params: SamplingParams | None = None, **template: Any
    ) -> list[RequestOutput]:
        """Answer chats.

        Args:
            messages: dicts with `role` and `content`, in order; or several such lists.
            params: how tokens are chosen.
            template: what the model's chat template takes, such as `tools`.

        Returns:
            One output for each chat.

        Raises:
            InputError: no chat template, or messages that it refuses.
        """
        several = isinstance(messages, Sequence) and messages and not isinstance(messages[0], Mapping)
        chats = messages if several else [messages]
        return self.generate([self.tokenizer.encode_chat(chat, **template) for chat in chats], params)  # type: ignore[arg-type]

    def why(self) -> str:
        """What this engine runs on.

        Returns:
            Lines about the model, its dtype and device, pages, limits and proposed tokens; print them.
        """
        engine = self.engine
        config, pool, weights = engine.decoder.config, engine.pages.pool, engine.decoder.bytes / 2**20
        groups = ", ".join(
            f"{len(group.layers)} layers with "
            + ("full attention" if group.window is None else f"a window of {group.window:,}")
            for group in engine.pages.groups
        )
        dtype = str(engine.decoder.dtype).removeprefix("torch.")
        return "\n".join(
            (
                f"{config.architecture}: {weights:,.0f} MiB of {dtype} weights on {engine.decoder.device}",
                f"KV cache: {engine.pages.tokens:,} tokens in {engine.pages.allocator.num_pages:,} pages of "
                f"{pool.page_size}, {pool.nbytes / 2**20:,.0f} MiB, {engine.config.kv_encoding or dtype}; {groups}",
                f"limits: {engine.max_model_len:,} tokens a request, {engine.config.max_running:,} requests at a time, "
                f"{engine.config.max_batch_tokens:,} tokens a step",
                f"prefix cache: {'on' if engine.config.prefix_cache else 'off'}; {_graphs(engine)}",
                f"proposed tokens: {_speculation(engine)}",
            )
        )

    def _answers(self, names: list[str]) -> list[RequestOutput]:
        """Run until these requests have ended."""
        left, found = set(names), {}
        while left:
            for request in self.engine.advance():
                if request.finished and request.request_id in left:
                    found[request.request_id] = request.output()
                    left.discard(request.request_id)
        return [found[name] for name in names]


def _speculation(engine: Engine) -> str:
    """How tokens are proposed, and what that gave so far: by steps of one request each."""
    speculation, counts = engine.config.speculation, engine.speculators.counts
    found = "none" if speculation is None else f"{speculation.method}, up to {speculation.nodes} a request"
    return f"{found}; {counts}" if counts.steps else found


def _graphs(engine: Engine) -> str:
    """Which steps are graphs."""
    graphs = engine.runner.graphs
    if graphs is None:
        return "CUDA graphs: none"
    kind = "CUDA graphs" if engine.decoder.device.type == "cuda" else "padded steps"
    parts = [
        f"{numbers[0]:,} to {numbers[-1]:,} {what}"
        for numbers, what in ((graphs.requests, "requests that decode"), (graphs.tokens, "tokens")) if numbers
    ]  # fmt: skip
    found = f"{kind} of {', and of '.join(parts)}" if parts else f"{kind}: none"
    return found if graphs.failed is None else f"{found}; {graphs.failed}"


def _listed(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str) or (isinstance(prompts, Sequence) and prompts and type(prompts[0]) is int):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InputError("prompts", got=type(prompts).__name__, expected="a list of prompts", hint='["…", [1, 2, 3]]')
    return list(prompts)
