"""Schemes of few bits written on the command line: `Sage(qk=int8, rotate=hadamard)`, read and never run.

A name of `tilewise`'s schemes, with keywords whose values are words, numbers or tuples of words; quotes may be left
out. Presets are without brackets, too: `Sage2`, `Sage2(int4)`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.quant.schemes import Scheme

MAX_TEXT = 400
MAKERS: dict[str, Callable[..., Scheme]] = {
    maker.__name__: maker for maker in (tw.Sage, tw.FP8, tw.Sage1, tw.Sage2, tw.Sage2pp, tw.FA3FP8)
}
HINT = "such as Sage2, Sage(qk=int8,rotate=hadamard) or FP8(q_scale=token)"


def read_scheme(text: str) -> Scheme:
    """The scheme that `text` describes; raises InputError that names what is wrong in it."""
    try:
        node = ast.parse(text.strip()[: MAX_TEXT + 1], mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        node = None
    call = ast.Call(node, [], []) if isinstance(node, ast.Name) else node
    good = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in MAKERS
    if not good or len(text) > MAX_TEXT:
        raise _refusal(text, f"one of {', '.join(MAKERS)}, with keywords in brackets")
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    values = [_value(text, argument) for argument in call.args]
    keywords = {str(keyword.arg): _value(text, keyword.value) for keyword in call.keywords}
    if isinstance(keywords.get("smooth"), str):  # (k) is k
        keywords["smooth"] = (keywords["smooth"],)
    maker = MAKERS[call.func.id]
    try:
        inspect.signature(maker).bind(*values, **keywords)
    except TypeError as error:
        names = ", ".join(inspect.signature(maker).parameters) or "nothing"
        raise _refusal(text, f"{call.func.id} with {names}: {error}") from error
    return maker(*values, **keywords)


def _value(text: str, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant) and type(node.value) in (int, str):
        return node.value
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(text, item) for item in node.elts)
    raise _refusal(text, f"a word, a number or a tuple of words in the place of {ast.unparse(node)}")


def _refusal(text: str, expected: str) -> InputError:
    return InputError("--scheme", got=repr(text[:MAX_TEXT]), expected=expected, hint=HINT)
