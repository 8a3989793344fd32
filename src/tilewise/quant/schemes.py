"""Schemes of attention in few bits, as data: which codes queries, keys and values become, who shares a scale, and what
is done before. `tilewise.quantize_qkv` makes such codes.

Queries come in blocks of `QUERIES`, keys and values in blocks of `KEYS`, as Hopper's tiles have them: with "thread" a
scale is shared by the rows that one thread of a matrix product holds, so that it meets one scale of a block of keys.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from typing import Any

from tilewise.core.errors import InputError, shown

QUERIES = 64  # of a block
KEYS = 128  # of a block
SAMPLED_FROM = 2048  # keys of a sequence from which some of them, as good a centre, are the mean's
SAMPLE, SAMPLED_OF = 64, 512  # so many of so many, the first of which take turns
WARP = 16  # queries of a warp's part of a block
SIDES = ("q", "k", "v")
ROTATIONS = ("none", "hadamard")
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}  # what the largest number of a group becomes
VALUE_IN_HALF = 4.5  # that of values where products with weights to 224 are summed in float16


@dataclass(frozen=True)
class Sage:
    """SageAttention: centred queries and keys with scales of few rows, values with scales of channels.

    Args:
        qk: codes of queries and keys: "int8", "fp8" (e4m3), or "int4" (from -7 to 7, stored as int8).
        pv: of values and weights: "fp8", or "fp16" or "bf16", which are not quantized.
        q_scale: which queries of a block of 64 share a scale: "token" none, "thread" two (rows 8 apart of a warp's 16),
            "warp" 16, "block" all.
        k_scale: which keys of a block of 128 share a scale: "token" none, "thread" 32 (keys 8 n + 2 t and
            8 n + 2 t + 1 have the t-th of four scales), "block" all.
        smooth: what is centred, in any order: "q" by the mean of a block of queries, "k" and "v" by that of a sequence
            (of 2,048 keys or more, "k" by the mean of an eighth of them). The means' part in scores and outputs is
            added back, so attention means the same.
        rotate: "hadamard" rotates queries and keys after centring (`tilewise.quant.rotate`), which spreads outliers
            over channels; head_dim is then a power of 2. "none" does not.
        pv_flush: number of blocks of keys after which 8-bit products go on in fresh accumulators. Those of Hopper and
            Ada keep 13 bits: the more keys one accumulator sums, the more it loses.
        pv_sum: "fp32", or "fp16", which is faster on some tensor cores: weights then reach 224 and values 4.5, so that
            the products of 64 keys fit.
        v_scale: for pv="fp8", which values share a scale: "channel", those of a channel, head and sequence; "block",
            all of 128 keys, which are then quantized without a look at the others. Errors are alike unless some
            channels are thousands of times larger than others.

    Raises:
        InputError: another value.

    Source: Zhang et al., "SageAttention: Accurate 8-Bit Attention for Plug-and-play Inference Acceleration", 2024;
    "SageAttention2: Efficient Attention with Thorough Outlier Smoothing and Per-thread INT4 Quantization", 2024;
    "SageAttention2++", 2025.

    Example:
        >>> scheme = tw.Sage(qk="int8", pv="fp8", rotate="hadamard")
        >>> o = tw.attention(q, k, v, mask=tw.causal, quantize=scheme)
    """

    qk: str = "int8"
    pv: str = "fp8"
    q_scale: str = "thread"
    k_scale: str = "thread"
    smooth: tuple[str, ...] = ("k",)
    rotate: str = "none"
    pv_flush: int = 1
    pv_sum: str = "fp32"
    v_scale: str = "channel"

    def __post_init__(self) -> None:
        _one_of("Sage qk", self.qk, ("int8", "fp8", "int4"), "codes of queries and keys")
        _one_of("Sage pv", self.pv, ("fp8", "fp16", "bf16"), "codes of values")
        _one_of("Sage q_scale", self.q_scale, ("token", "thread", "warp", "block"), "which queries share a scale")
        _one_of("Sage k_scale", self.k_scale, ("token", "thread", "block"), "which keys share a scale")
        object.__setattr__(self, "smooth", _sides("Sage smooth", self.smooth))
        _one_of("Sage rotate", self.rotate, ROTATIONS, "of queries and keys")
        _flush("Sage pv_flush", self.pv_flush)
        sums = ("fp32", "fp16") if self.pv == "fp8" else ("fp32",)
        _one_of("Sage pv_sum", self.pv_sum, sums, "fp16 is for products of 8 bits")
        blocks = ("channel", "block") if self.pv == "fp8" else ("channel",)
        _one_of("Sage v_scale", self.v_scale, blocks, "block is for codes of 8 bits")

    @property
    def text(self) -> str:
        """The scheme as text, which `parse_scheme` reads."""
        smooth = "".join(f"{side}," for side in self.smooth)
        return (
            f"Sage(qk={self.qk}, pv={self.pv}, q_scale={self.q_scale}, k_scale={self.k_scale}, smooth=({smooth}), "
            f"rotate={self.rotate}, pv_flush={self.pv_flush}, pv_sum={self.pv_sum}, v_scale={self.v_scale})"
        )

    @property
    def v_largest(self) -> float:
        """What the largest value of a channel becomes, in fp8."""
        return VALUE_IN_HALF if self.pv_sum == "fp16" else LARGEST["fp8"]

    @property
    def p_largest(self) -> float:
        """What a weight of 1 becomes before it is rounded to fp8."""
        return LARGEST["fp8"] / 2 if self.pv_sum == "fp16" else LARGEST["fp8"]


@dataclass(frozen=True)
class FP8:
    """Queries, keys, values and weights in FP8 (e4m3), with scales of heads, blocks or tokens.

    Args:
        q_scale: which queries share a scale: "head", all of a head and sequence; "block", 64 of them; "token", none.
        k_scale: likewise for keys, in blocks of 128.
        v_scale: which values share a scale: "head"; "block"; "channel", those of a channel, head and sequence.
        rotate: "hadamard" rotates queries and keys, which spreads outliers over channels; head_dim is then a power of
            2. "none" does not.
        pv_flush: as in `Sage`.

    Raises:
        InputError: another value.

    Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024.

    Example:
        >>> scheme = tw.FP8(q_scale="block", k_scale="block", v_scale="block")
        >>> o = tw.attention(q, k, v, quantize=scheme)
    """

    q_scale: str = "head"
    k_scale: str = "head"
    v_scale: str = "head"
    rotate: str = "none"
    pv_flush: int = 1

    def __post_init__(self) -> None:
        for name in ("q_scale", "k_scale"):
            _one_of(f"FP8 {name}", getattr(self, name), ("head", "block", "token"), "which rows share a scale")
        _one_of("FP8 v_scale", self.v_scale, ("head", "block", "channel"), "which values share a scale")
        _one_of("FP8 rotate", self.rotate, ROTATIONS, "of queries and keys")
        _flush("FP8 pv_flush", self.pv_flush)

    @property
    def text(self) -> str:
        """The scheme as text, which `parse_scheme` reads."""
        return (
            f"FP8(q_scale={self.q_scale}, k_scale={self.k_scale}, v_scale={self.v_scale}, rotate={self.rotate}, "
            f"pv_flush={self.pv_flush})"
        )

    @property
    def qk(self) -> str:
        """Codes of queries and keys."""
        return "fp8"

    @property
    def pv(self) -> str:
        """Codes of values and weights."""
        return "fp8"

    @property
    def smooth(self) -> tuple[str, ...]:
        """Nothing is centred."""
        return ()

    @property
    def v_largest(self) -> float:
        """What the largest value that shares a scale becomes."""
        return LARGEST["fp8"]

    @property
    def p_largest(self) -> float:
        """What a weight of 1 becomes before it is rounded."""
        return 256.0


Scheme = Sage | FP8


def Sage1() -> Sage:
    """SageAttention: INT8 scores with scales of blocks, keys centred, values and weights in float16.

    Returns:
        A `Sage`.

    Source: Zhang et al., "SageAttention", 2024.

    Example:
        >>> o = tw.attention(q, k, v, quantize=tw.Sage1())
    """
    return Sage(qk="int8", pv="fp16", q_scale="block", k_scale="block", smooth=("k",))


def Sage2(qk: str = "int8") -> Sage:
    """SageAttention2: INT8 or INT4 scores with scales of threads, keys centred, values and weights in FP8.

    Args:
        qk: codes of queries and keys: "int8", "fp8" or "int4", with which queries are centred as well.

    Returns:
        A `Sage`.

    Raises:
        InputError: another qk.

    Source: Zhang et al., "SageAttention2", 2024.

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.causal, quantize=tw.Sage2())
    """
    return Sage(qk=qk, smooth=("q", "k") if qk == "int4" else ("k",))


def Sage2pp(qk: str = "int8") -> Sage:
    """SageAttention2++: as SageAttention2, with products of weights and values summed in float16.

    Args:
        qk: as in `Sage2`.

    Returns:
        A `Sage`.

    Raises:
        InputError: another qk.

    Source: Zhang et al., "SageAttention2++", 2025.

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.causal, quantize=tw.Sage2pp())
    """
    return Sage(qk=qk, smooth=("q", "k") if qk == "int4" else ("k",), pv_sum="fp16")


def FA3FP8() -> FP8:
    """FlashAttention-3's FP8, as its interface takes it: one scale for q, k and v of each head.

    Returns:
        An `FP8`.

    Source: Shah et al., "FlashAttention-3", 2024.

    Example:
        >>> o = tw.attention(q, k, v, quantize=tw.FA3FP8())
    """
    return FP8()


_NAMES = {made.__name__: made for made in (Sage, FP8, Sage1, Sage2, Sage2pp, FA3FP8)}


@functools.lru_cache(maxsize=256)
def parse_scheme(text: str) -> Scheme:
    """The scheme that a text such as "Sage2()" or "Sage(qk=fp8, rotate=hadamard)" names, a scheme's own `text` for one.

    Raises InputError for any other text, or a value that the scheme does not have.
    """
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        made = _NAMES[call.func.id]
        return made(*map(_value, call.args), **{str(part.arg): _value(part.value) for part in call.keywords})
    except (SyntaxError, AssertionError, KeyError, ValueError, TypeError) as error:
        raise InputError(
            "scheme",
            got=shown(text),
            expected=f"one of {', '.join(_NAMES)} with its arguments",
            hint='for instance "Sage2()" or "Sage(qk=int8, rotate=hadamard)"',
        ) from error


def _value(node: ast.expr) -> Any:
    """A literal, where names stand for themselves."""
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def check_scheme(scheme: Any, name: str = "scheme") -> Scheme:
    """The scheme, if it is one; raises InputError."""
    if not isinstance(scheme, (Sage, FP8)):
        raise InputError(
            name,
            got=shown(scheme),
            expected="a tilewise.Sage or a tilewise.FP8",
            hint="tilewise.Sage2() and tilewise.FA3FP8() are two of the published ones",
        )
    return scheme


def _one_of(name: str, value: Any, allowed: tuple[str, ...], says: str) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise InputError(name, got=shown(value), expected=f"one of {', '.join(map(repr, allowed))}", hint=says)


def _sides(name: str, value: Any) -> tuple[str, ...]:
    """The sides in one order, so that schemes of one meaning are equal."""
    good = isinstance(value, (tuple, list, set, frozenset)) and all(side in SIDES for side in value)
    if not good or len(set(value)) != len(value):
        raise InputError(
            name, got=shown(value), expected="a tuple of some of 'q', 'k', 'v'", hint='("k",) centres keys, () nothing'
        )
    return tuple(side for side in SIDES if side in value)


def _flush(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(name, got=shown(value), expected="1 or more", hint="blocks of 128 keys; 1 is most accurate")
