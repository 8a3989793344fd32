"""Ways of proposing tokens by name, and what an engine is told about them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.engine.decoding.proposers.base import Proposer
from tilewise.engine.decoding.proposers.draft import DraftProposer
from tilewise.engine.decoding.proposers.lookahead import LookaheadProposer
from tilewise.engine.decoding.proposers.ngram import NgramProposer
from tilewise.engine.decoding.proposers.suffix import SharedSuffixes, SuffixProposer
from tilewise.engine.decoding.rules import Distance, Rule, TopK, Typical
from tilewise.engine.decoding.tree import WORD
from tilewise.kv.arguments import check_count

METHODS: dict[str, Callable[..., Proposer]] = {
    "ngram": NgramProposer, "suffix": SuffixProposer, "lookahead": LookaheadProposer, "draft": DraftProposer,
}  # fmt: skip
MOST_NODES = WORD - 1  # beside the root: a node's ancestors are bits of one word
_OF_THE_ENGINE = ("shared",)  # arguments of proposers that the engine gives


@dataclass(frozen=True)
class Speculation:
    """How an engine proposes tokens, which one step of the model then verifies together.

    Tokens are those of plain decoding, whatever is proposed, unless a `rule` says otherwise.

    Args:
        method: "ngram", "suffix", "lookahead" or "draft"; several joined by "+" propose one tree together.
        options: arguments of the method's proposer, by name; of several methods a mapping for each, by method.
        draft: for "draft", a smaller model of the same vocabulary: a folder, "smollm2", "random:NAME", or a decoder.
        rule: which proposed tokens stay: None those of plain decoding; `Typical`, `TopK` or `Distance` of
            `tilewise.engine.decoding.rules` more of them, so that answers differ, and say so (`Completion.lossy`).
        nodes: proposed tokens of a request in a step at most, 1 to 63.
        learned: whether the number of proposed tokens follows from measured times of steps, none where they do not pay;
            if False all are computed.

    Raises:
        InputError: an unknown method or option, or a number out of range.

    Source: Chen, Borgeaud, Irving, Lespiau, Sifre and Jumper, "Accelerating Large Language Model Decoding with
    Speculative Sampling", 2023; `docs/papers.md` has the methods' own.

    Example:
        >>> from tilewise.engine import Speculation
        >>> Speculation("ngram", {"longest": 3}, nodes=8).methods
        ('ngram',)
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    draft: Any = None
    rule: Rule | None = None
    nodes: int = 15
    learned: bool = True

    def __post_init__(self) -> None:
        check_method("method", self.method)
        check_count("nodes", self.nodes, 1)
        if self.nodes > MOST_NODES:
            hint = "a step verifies few tokens at the price of one"
            raise InputError("nodes", got=self.nodes, expected=f"at most {MOST_NODES}", hint=hint)
        check_flags(learned=self.learned)
        if self.rule is not None and not isinstance(self.rule, (Typical, TopK, Distance)):
            hint = "None keeps plain decoding's tokens"
            raise InputError("rule", got=shown(self.rule), expected="Typical, TopK or Distance", hint=hint)
        if not isinstance(self.options, Mapping):
            raise InputError("options", got=shown(self.options), expected="a mapping", hint='{"longest": 3}')
        if len(self.methods) > 1:
            _check_names("options", self.options, self.methods)
        for method in self.methods:
            own = self._options_of(method)
            if not isinstance(own, Mapping):
                got = f"{method}: {shown(own)}"
                raise InputError("options", got=got, expected="a mapping for each method", hint='{"ngram": {}}')
            known = [name for name in inspect.signature(METHODS[method]).parameters if name not in _OF_THE_ENGINE]
            _check_names(f"options of {method}", own, known)
        if ("draft" in self.methods) != (self.draft is not None):
            got = "no draft model" if self.draft is None else f"a draft model for {self.method!r}"
            hint = 'Speculation("draft", draft="path/to/folder")'
            raise InputError("draft", got=got, expected='one for the method "draft", and only then', hint=hint)
        self.parts()  # their values are checked now

    @property
    def lossy(self) -> bool:
        """Whether answers may differ from plain decoding's."""
        return self.rule is not None

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods' names."""
        return tuple(self.method.split("+"))

    def _options_of(self, method: str) -> Any:
        """The options of one of the methods."""
        return self.options.get(method, {}) if len(self.methods) > 1 else self.options

    def parts(self, shared: SharedSuffixes | None = None) -> list[Proposer]:
        """Proposers for one request, one of each method.

        Args:
            shared: texts of other requests, for "suffix"; None without.

        Returns:
            Those, which remember what they are shown.
        """
        return [
            METHODS[method](**({"shared": shared} if method == "suffix" else {}), **self._options_of(method))
            for method in self.methods
        ]


def check_method(name: str, value: object) -> None:
    """Raise InputError unless this names a method, or several, joined by "+"."""
    parts = value.split("+") if isinstance(value, str) else [None]
    if not all(part in METHODS for part in parts) or len({*parts}) < len(parts):
        expected = f"{', '.join(map(repr, METHODS))}, or some of them joined by '+'"
        raise InputError(name, got=shown(value), expected=expected, hint="None proposes nothing")


def speculation_of(name: str, value: object) -> Speculation | None:
    """What an argument says: None, the name of a method, or a `Speculation`; raises InputError."""
    if value is None or isinstance(value, Speculation):
        return value
    check_method(name, value)
    assert isinstance(value, str)
    if "draft" in value.split("+"):
        hint = 'Speculation("draft", draft="path/to/folder")'
        raise InputError(name, got=shown(value), expected="a Speculation, which names the draft model", hint=hint)
    return Speculation(value)


def _check_names(name: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [each for each in given if each not in known]
    if unknown:
        raise InputError(name, got=shown(unknown[0]), expected=", ".join(known), hint="leave it out for the default")
