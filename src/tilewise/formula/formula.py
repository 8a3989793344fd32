"""Masks and scores: traced once, combined by an algebra, compared by meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from tilewise.core.errors import FormulaError, InputError
from tilewise.formula.evaluate import evaluate
from tilewise.formula.expr import Expr, logic, negate
from tilewise.formula.sizes import Size
from tilewise.formula.structure import Binding, Bound, Structure, parse
from tilewise.formula.trace import trace
from tilewise.formula.walk import render, transform
from tilewise.formula.walk import symbols as symbols_of

MOST_JOINED = 30  # masks and scores in a row whose names make a name
LONGEST = 400  # characters of a name
Name = str | Callable[[], str] | None  # a function where the name costs something, or holds a symbolic number


class Formula:
    """A traced expression with its captured tensors and numbers.

    Two formulas are equal when their structure and numbers are equal and they capture the same tensors. `text` is the
    structure alone: formulas with equal text run the same compiled kernel. `joins` counts the names in a name.
    """

    def __init__(self, expr: Expr, name: Name = None, joins: int = 0, sizes: tuple[Size, ...] = ()) -> None:
        binding = Binding()
        self.expr = expr
        self.name = name if joins <= MOST_JOINED else None
        self.joins = joins
        self.sizes = sizes  # of the calls that it is for
        self._shown: str | None = None
        self.text = binding.text(expr)
        self.tensors: tuple[torch.Tensor, ...] = tuple(binding.tensors)
        self.numbers: tuple[Any, ...] = tuple(binding.numbers)

    @property
    def structure(self) -> Structure:
        """The parsed structure, shared by all formulas of equal text."""
        return parse(self.text)

    @property
    def bound(self) -> Bound:
        """Structure text, captured tensors and numbers."""
        return Bound(self.text, self.tensors, self.numbers)

    def _identity(self) -> tuple[Any, ...]:
        return (type(self).__name__, self.text, self.numbers, tuple(id(t) for t in self.tensors))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.expr, repr(self), 0, self.sizes)  # a name may be a function, which cannot be pickled

    def __repr__(self) -> str:
        if self._shown is None:  # once: a name asks for those of what it joins, which may be the same often
            name = self.name if isinstance(self.name, str) else self.name and self.name()
            shown = name or render(self.expr)
            self._shown = shown if len(shown) <= LONGEST else shown[:LONGEST] + "..."
        return self._shown

    def _joined(self, *others: Formula) -> int:
        """How many names a name has that joins these."""
        return 1 + max(formula.joins for formula in (self, *others))

    def sized(self, *sizes: Size) -> Self:
        """This formula, for calls of these sizes alone."""
        self.sizes = sizes
        return self

    def evaluate(self, *, dtype: torch.dtype = torch.float32, **symbols: torch.Tensor) -> torch.Tensor:
        """The value at given positions, in PyTorch: to look at a formula, or to make a dense mask or bias of it.

        Args:
            dtype: floating-point type of a score's arithmetic.
            symbols: by name, integer tensors `b`, `h`, `i`, `j` (and a float tensor `s` for a score); they broadcast.

        Returns:
            A tensor of the symbols' broadcast shape: bool for a mask, dtype for a score.

        Raises:
            InputError: a symbol that the formula uses is missing.
        """
        missing = sorted(symbols_of(self.structure.root) - symbols.keys()) or ([] if symbols else ["i"])
        if missing:
            raise InputError(
                "evaluate",
                got=f"no {', '.join(missing)}",
                expected=f"a tensor for each symbol of {self!r}",
                hint="by keyword, for example i=torch.arange(4)[:, None], j=torch.arange(4)",
            )
        return evaluate([self.structure.root], symbols, self.tensors, self.numbers, dtype)[0]


class Mask(Formula):
    """Which pairs of query and key count; combine masks with `&`, `|` and `~`.

    Made by `tilewise.mask` or a function of this library (`tilewise.window`), and given to `attention(mask=...)`. Two
    masks are equal if their structure, their numbers and their captured tensors are. Masks that differ only in numbers
    or tensors run the same compiled kernel.

    Args:
        expr: a traced expression; call `tilewise.mask` rather than this.
        name: what `repr` shows; None shows the expression.
        joins, sizes: for the library's own use.

    Raises:
        FormulaError: a mask is used as a bool, as `and`, `or` and `not` do, or combined with something else.

    Example:
        >>> mask = tw.causal & (tw.window(64) | tw.sinks(4))
        >>> mask
        causal & (window(64) | sinks(4))
        >>> mask.evaluate(i=torch.tensor(90), j=torch.tensor([3, 4, 26, 27]))
        tensor([ True, False, False,  True])
    """

    def __and__(self, other: Any) -> Mask:
        other = as_mask(other)
        name = lambda: f"{self._operand('&')} & {other._operand('&')}"  # noqa: E731
        return Mask(logic("and", self.expr, other.expr), name, self._joined(other), self.sizes + other.sizes)

    __rand__ = __and__

    def __or__(self, other: Any) -> Mask:
        other = as_mask(other)
        name = lambda: f"{self._operand('|')} | {other._operand('|')}"  # noqa: E731
        return Mask(logic("or", self.expr, other.expr), name, self._joined(other), self.sizes + other.sizes)

    __ror__ = __or__

    def __invert__(self) -> Mask:
        return Mask(negate(self.expr), lambda: f"~{self._operand('~')}", self._joined(), self.sizes)

    def _operand(self, operator: str) -> str:
        text = repr(self)
        compound = " & " in text or " | " in text
        return f"({text})" if compound and not text.startswith("(") and f" {operator} " not in text else text

    def __bool__(self) -> bool:
        raise FormulaError(
            "bool(mask)",
            got=f"the mask {self!r}",
            expected="masks combined by & | ~",
            hint="`and`, `or` and `not` would silently drop a mask; write causal & window(1024)",
        )


class Score(Formula):
    """What becomes of a scaled score; `first >> then` applies `then` to the result of `first`.

    Made by `tilewise.score` or a function of this library (`tilewise.softcap`), and given to `attention(score=...)`.
    Equality, and which scores share a compiled kernel, are as for `tilewise.Mask`.

    Args:
        expr: a traced expression; call `tilewise.score` rather than this.
        name: what `repr` shows; None shows the expression.
        joins, sizes: for the library's own use.

    Raises:
        FormulaError: a score is used as a bool, or composed with something else.

    Example:
        >>> score = tw.alibi(torch.full((4,), 0.5)) >> tw.softcap(30.0)
        >>> o = tw.attention(q, k, v, mask=tw.causal, score=score)
    """

    def __rshift__(self, other: Any) -> Score:
        then = as_score(other)

        def insert(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
            return self.expr if node.op == "sym" and node.value == "s" else None

        name = lambda: f"{self!r} >> {then!r}"  # noqa: E731
        return Score(transform(then.expr, insert), name, self._joined(then), self.sizes + then.sizes)

    def __rrshift__(self, other: Any) -> Score:
        return as_score(other) >> self

    def __bool__(self) -> bool:
        raise FormulaError(
            "bool(score)",
            got=f"the score {self!r}",
            expected="scores composed by >>",
            hint="write alibi(slopes) >> softcap(30.0)",
        )


def mask(fn: Callable[..., Any], name: Name = None) -> Mask:
    """Trace `fn(b, h, i, j) -> bool` into a mask; `attention(mask=fn)` does so as well.

    The function is called once, with symbols: b is the batch element (the sequence, in a packed layout), h the query
    head, i the query's position on the key axis (query index + seqlen_k - seqlen_q), j the key's position. It may use
    comparisons, arithmetic, `&`, `|`, `~`, `torch.where` and their like, and captured tensors of up to four dimensions,
    indexed by integer expressions. A tensor whose last index is missing is a row: `.sum(-1)`, `.any(-1)` and their like
    reduce it to one value.

    Args:
        fn: the function; True where query i may see key j.
        name: what `repr` shows; None shows the expression.

    Returns:
        A `Mask`.

    Raises:
        FormulaError: fn branches on a traced value, or does something outside the formula language.

    Source: Dong et al., "FlexAttention", 2024, for the functions' meaning.

    Example:
        >>> every_third = tw.mask(lambda b, h, i, j: (i - j) % 3 == 0)
        >>> o = tw.attention(q, k, v, mask=tw.causal & every_third)
    """
    return Mask(trace(fn, ("b", "h", "i", "j"), "bool", "mask", name is not None), name)


def score(fn: Callable[..., Any], name: Name = None) -> Score:
    """Trace `fn(s, b, h, i, j) -> float` into a score; `attention(score=fn)` does so as well.

    Args:
        fn: the function; s is the scaled score, the other symbols are those of `tilewise.mask`. Floating-point tensors
            that it captures get gradients.
        name: what `repr` shows; None shows the expression.

    Returns:
        A `Score`.

    Raises:
        FormulaError: fn branches on a traced value, or does something outside the formula language.

    Source: Dong et al., "FlexAttention", 2024, for the functions' meaning.

    Example:
        >>> slope = torch.full((4,), 0.1, requires_grad=True)
        >>> o = tw.attention(q, k, v, score=tw.score(lambda s, b, h, i, j: s - slope[h] * abs(i - j)))
        >>> o.sum().backward()
        >>> slope.grad.shape
        torch.Size([4])
    """
    return Score(trace(fn, ("s", "b", "h", "i", "j"), "float", "score", name is not None), name)


def as_mask(value: Any) -> Mask:
    """A Mask as it is; a function is traced."""
    if isinstance(value, Mask):
        return value
    if callable(value) and not isinstance(value, Formula):
        return mask(value)
    dense = isinstance(value, torch.Tensor)
    raise FormulaError(
        "mask",
        got=f"a {value.dtype} tensor {tuple(value.shape)}" if dense else f"{type(value).__name__} {value!r}",
        expected="a Mask or a function (b, h, i, j) -> bool",
        hint="tilewise.explicit(keep) takes a boolean tensor, tilewise.bias(values) as score= a float one"
        if dense
        else "tilewise.causal, tilewise.window(n), or your own function; what changes scores goes to score=",
    )


def as_score(value: Any) -> Score:
    """A Score as it is; a function is traced."""
    if isinstance(value, Score):
        return value
    if callable(value) and not isinstance(value, Formula):
        return score(value)
    dense = isinstance(value, torch.Tensor)
    raise FormulaError(
        "score",
        got=f"a {value.dtype} tensor {tuple(value.shape)}" if dense else f"{type(value).__name__} {value!r}",
        expected="a Score or a function (s, b, h, i, j) -> float",
        hint="tilewise.bias(values) takes a tensor" if dense else "what hides pairs goes to mask=",
    )
