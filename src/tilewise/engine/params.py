"""What a request asks of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.core.real import is_finite
from tilewise.engine.decoding.methods import check_method

_LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which logits are
MOST_LOGPROBS = 20
MOST_SAMPLES = 128
MOST_STOPS = 16


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when an answer ends.

    Args:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_p: the smallest set of tokens with at least this probability stays; 1 keeps all.
        top_k: so many of the most likely tokens stay; 0 keeps all.
        min_p: tokens with less than this share of the largest probability go; 0 keeps all.
        seed: of the random numbers. The same prompt, parameters and seed give the same tokens, whatever else is in the
            batch. None draws one, which the output tells.
        n: answers; answer i has a seed of its own, derived from `seed` and i.
        max_tokens: tokens of an answer at most; None is as many as the context holds.
        min_tokens: before so many, no end token and no stop string ends it.
        stop: strings that end it, of which none is part of the text unless `include_stop`.
        stop_token_ids: tokens that end it, beside the model's own.
        include_stop: whether the text keeps the string that ended it.
        ignore_eos: whether the model's end tokens are tokens like others.
        repetition_penalty: above 1 makes tokens of prompt and answer less likely (Keskar et al., "CTRL", 2019).
        presence_penalty: subtracted from logits of tokens that the answer has.
        frequency_penalty: subtracted for each time that it has them.
        logit_bias: added to logits, by token.
        bad_token_ids: tokens that never come.
        allowed_token_ids: the only ones that may; None is all.
        logprobs: log-probabilities of so many of the most likely tokens, at each position, and of the chosen one.
        prompt_logprobs: the same of the prompt's tokens.
        echo: whether the text begins with the prompt.
        skip_special_tokens: whether the text leaves out tokens such as end marks.
        speculative: None is the engine's way of proposing tokens, False none, and a name that of `Speculation`. Tokens
            are the same.

    Raises:
        InputError: a value out of range, or two that contradict each other.

    Example:
        >>> from tilewise.engine import SamplingParams
        >>> SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=32).greedy
        False
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_token_ids: tuple[int, ...] | list[int] = ()
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    speculative: str | bool | None = None

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _listed("stop", stops, str))
        for name in ("stop_token_ids", "bad_token_ids"):
            object.__setattr__(self, name, _listed(name, getattr(self, name), int))
        if self.allowed_token_ids is not None:
            allowed = _listed("allowed_token_ids", self.allowed_token_ids, int)
            object.__setattr__(self, "allowed_token_ids", allowed)
            if not set(allowed) - set(self.bad_token_ids):
                hint = "leave allowed_token_ids out to allow all"
                raise InputError("allowed_token_ids", got=shown(allowed), expected="one that is not bad", hint=hint)
        _check_number("temperature", self.temperature, 0.0, _LARGEST, "0 is greedy")
        _check_number("top_p", self.top_p, 0.0, 1.0, "1 keeps all tokens", open_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0, "0 keeps all tokens")
        _check_number("repetition_penalty", self.repetition_penalty, 1e-30, 1e30, "1 is none")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -_LARGEST, _LARGEST, "0 is none")
        _check_count("top_k", self.top_k, 0, 2**31 - 1, "0 keeps all tokens")
        _check_count("n", self.n, 1, MOST_SAMPLES, "answers to one prompt")
        _check_count("min_tokens", self.min_tokens, 0, 2**31 - 1, "0 is none")
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens, max(1, self.min_tokens), 2**31 - 1, "None is all that fit")
        if self.seed is not None:
            _check_count("seed", self.seed, 0, 2**63 - 1, "None draws one")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 0, MOST_LOGPROBS, "None gives none")
        flags = ("include_stop", "ignore_eos", "echo", "skip_special_tokens")
        check_flags(**{name: getattr(self, name) for name in flags})
        if self.speculative is not None and self.speculative is not False:
            check_method("speculative", self.speculative)
        if len(self.stop) > MOST_STOPS or "" in self.stop:
            expected = f"up to {MOST_STOPS} strings, none of them empty"
            raise InputError("stop", got=shown(self.stop), expected=expected, hint="tokens go to stop_token_ids")
        if not isinstance(self.logit_bias, Mapping):
            got = type(self.logit_bias).__name__
            raise InputError("logit_bias", got=got, expected="numbers by token", hint="logit_bias={17: -2.0}")
        for token, bias in self.logit_bias.items():
            _check_count("logit_bias token", token, 0, 2**31 - 1, "token ids are keys")
            _check_number("logit_bias", bias, -_LARGEST, _LARGEST, "bad_token_ids forbids a token")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before a token is drawn from them."""
        penalties = (self.repetition_penalty - 1.0, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or bool(self.logit_bias or self.bad_token_ids) or self.allowed_token_ids is not None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InputError where a token is outside the vocabulary, or more are to be listed than it has."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "bad_token_ids": self.bad_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": self.logit_bias,
        }
        for name, tokens in named.items():
            outside = [token for token in tokens if not 0 <= token < vocab_size]
            if outside:
                raise InputError(name, got=outside[0], expected=f"0 to {vocab_size - 1}", hint="ids of the vocabulary")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                expected, hint = f"at most {vocab_size}", "as many as the vocabulary has"
                raise InputError(name, got=getattr(self, name), expected=expected, hint=hint)


def _listed(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    ok = isinstance(values, (list, tuple)) and all(type(value) is kind for value in values)
    if not ok:
        raise InputError(name, got=shown(values), expected=f"a list of {kind.__name__}", hint="leave it out for none")
    return tuple(values)


def _check_number(name: str, value: Any, low: float, high: float, hint: str, open_low: bool = False) -> None:
    if not is_finite(value) or not low <= value <= high or (open_low and value == low):
        expected = f"a number {'above' if open_low else 'of at least'} {low:g}, up to {high:g}"
        raise InputError(name, got=shown(value), expected=expected, hint=hint)


def _check_count(name: str, value: Any, low: int, high: int, hint: str) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InputError(name, got=shown(value), expected=f"an integer from {low} to {high}", hint=hint)
