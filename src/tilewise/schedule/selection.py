"""Which tiles of keys a tile of queries computes exactly, as data: what `attention(select=...)` takes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.formula.formula import Mask

SHORTEST = 2.0**-63  # a row that has a direction: a GPU's root takes squares below 2**-126 for 0
FAR = ("drop", "summary", "summary2")
MOST = 2**31 - 1  # of what is counted
LARGEST = 2**16  # rows of a tile
PerHead = float | tuple[float, ...]


@dataclass(frozen=True)
class Sparge:
    """Block-sparse attention over the tiles that hold most of a softmax over means of tiles.

    A tile of queries and a tile of keys have the score of the product of their means. The tiles of keys with the
    largest softmax weights are computed, as many as it takes for these weights to sum to `tau`. Means say little where
    a tile's rows differ: a tile of keys whose self-similarity (the mean of all cosines between its rows) is at most
    `theta` is computed for all queries, and such a tile of queries computes all tiles. `lam` skips more tiles once
    their scores are known.

    Args:
        tau: in (0, 1]; 1 computes every tile. One number, or one for each query head.
        theta: in [-1, 1]; 1 computes every tile, -1 uses only means. One number, or one for each query head.
        lam: skip a tile whose scores are all more than `lam` below the running maximum of their rows: its weights are
            below exp(-lam) of the largest one's. With log(seqlen) + 7 at most a thousandth of a row's sum is left out.
            Which tiles these are depends on the order in which an implementation visits tiles, and on its tile sizes; a
            NaN among such scores may be skipped. Ignored where gradients are wanted. One number, or one for each query
            head; None skips nothing.

    Raises:
        InputError: another value.

    Source: Zhang et al., "SpargeAttention: Accurate and Training-free Sparse Attention Accelerating Any Model
    Inference", 2025.

    Example:
        >>> o = tw.attention(q, k, v, mask=tw.causal, select=tw.Sparge(tau=0.95, theta=0.5))
    """

    tau: PerHead = 0.98
    theta: PerHead = 0.6
    lam: PerHead | None = None

    def __post_init__(self) -> None:
        _by_head(self, "Sparge tau", "tau", 0.0, 1.0, open_below=True)
        _by_head(self, "Sparge theta", "theta", -1.0, 1.0)
        if self.lam is not None:
            _by_head(self, "Sparge lam", "lam", 0.0, math.inf, open_below=True)


@dataclass(frozen=True)
class TopK:
    """Block-sparse attention over the tiles of keys whose means score best with the mean of a tile of queries.

    Args:
        k: number of tiles, an integer from 1 to 2**31 - 1, or the share of those that the mask does not hide, in (0,
            1], rounded up. One number, or one for each query head.
        theta: as in `Sparge`; -1, the default, uses only means.

    Raises:
        InputError: another value.

    Example:
        >>> o = tw.attention(q, k, v, select=tw.Select(tw.TopK(0.5), block=25))
    """

    k: PerHead = 0.5
    theta: PerHead = -1.0

    def __post_init__(self) -> None:
        _by_head(self, "TopK theta", "theta", -1.0, 1.0)
        values = _values(self.k)
        counts = [isinstance(k, numbers.Integral) and not isinstance(k, bool) for k in values]
        shares = not any(counts) and all(_within(k, 0.0) for k in values)
        good = all(1 <= k <= MOST for k in values) if all(counts) else shares
        if not values or not good:
            raise InputError(
                "TopK k",
                got=shown(self.k),
                expected="integers from 1 to 2**31 - 1, or numbers in (0, 1]",
                hint="8 selects eight tiles, 0.25 a quarter of the visible ones",
            )
        _keep(self, "k", self.k)

    @property
    def counts(self) -> bool:
        """Whether `k` counts tiles."""
        return isinstance(_values(self.k)[0], numbers.Integral)


@dataclass(frozen=True)
class Threshold:
    """Block-sparse attention over the tiles of keys with at least a given weight in a softmax over means of tiles.

    Args:
        weight: in [0, 1]. One number, or one for each query head.
        theta: as in `Sparge`; -1, the default, uses only means.

    Raises:
        InputError: another value.

    Example:
        >>> o = tw.attention(q, k, v, select=tw.Select(tw.Threshold(0.01), block=25))
    """

    weight: PerHead
    theta: PerHead = -1.0

    def __post_init__(self) -> None:
        _by_head(self, "Threshold weight", "weight", 0.0, 1.0)
        _by_head(self, "Threshold theta", "theta", -1.0, 1.0)


Prediction = Sparge | TopK | Threshold


@dataclass(frozen=True, init=False)
class Select:
    """The tiles that any of its parts selects, with their size, and what stands for the others.

    A tile of queries for which a prediction selects nothing computes its best tile. So a query that the mask lets see a
    key sees one, unless the mask cuts that tile and hides the query's part of it.

    Args:
        parts: predictions (`Sparge`, `TopK`, `Threshold`), and Masks, which select each tile with a pair that they
            show: `Select(tilewise.Sparge(0.95), tilewise.window(512), tilewise.sinks(128))`.
        block: queries and keys of a tile, up to 65,536, one integer for both or a pair. Kernels have tiles of 64 and
            128, and are fastest where theirs divide these.
        far: what stands for tiles that are not computed. "drop": nothing. "summary": each is one more key in the same
            softmax, the mean of its keys, with the mean of its values and log(number of keys) added to its score.
            "summary2" adds half the variance of its scores as well, from the variance of its keys in each dimension.
            With either, tiles that the mask cuts are always computed: a summary is of keys that all its queries may
            see.
        share_group: if True, the query heads of one key/value head compute the tiles of all of them.

    Raises:
        InputError: another value.

    Example:
        >>> select = tw.Select(tw.TopK(1), tw.sinks(4), block=25, far="summary")
        >>> o = tw.attention(q, k, v, select=select)
    """

    parts: tuple[Prediction | Mask, ...]
    block: tuple[int, int]
    far: str
    share_group: bool

    def __init__(
        self,
        *parts: Prediction | Mask,
        block: int | Sequence[int] = (128, 128),
        far: str = "drop",
        share_group: bool = False,
    ) -> None:
        check_flags(**{"Select share_group": share_group})
        for part in parts:
            if not isinstance(part, (Sparge, TopK, Threshold, Mask)):
                raise InputError(
                    "Select parts",
                    got=shown(part),
                    expected="predictions (Sparge, TopK, Threshold) and Masks",
                    hint="tilewise.mask(function) makes a Mask",
                )
        if not parts:
            raise InputError("Select parts", got="none", expected="one or more", hint="Select(tilewise.Sparge())")
        pair = tuple(block) if isinstance(block, Sequence) else (block, block)
        counts = all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= LARGEST for n in pair)
        if len(pair) != 2 or not counts:
            expected, hint = "one or two integers from 1 to 65536", "128, or (128, 64) for 128 queries and 64 keys"
            raise InputError("Select block", got=shown(block), expected=expected, hint=hint)
        if far not in FAR:
            hint = "a summary stands for the keys of a tile that is not computed"
            raise InputError("Select far", got=shown(far), expected=f"one of {', '.join(map(repr, FAR))}", hint=hint)
        _keep(self, "parts", parts)
        _keep(self, "block", pair)
        _keep(self, "far", far)
        _keep(self, "share_group", bool(share_group))

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The parts that are predictions."""

        return tuple(part for part in self.parts if not isinstance(part, Mask))

    @property
    def skip(self) -> PerHead | None:
        """The largest `lam` of its parts, one number or one for each head; None where a prediction has none."""
        lams = [part.lam if isinstance(part, Sparge) else None for part in self.predictions]
        known = [_values(lam) for lam in lams if lam is not None]
        if not known or len(known) < len(lams):
            return None
        heads = max(map(len, known))
        if any(len(values) not in (1, heads) for values in known):
            got = " and ".join(f"{len(values)} numbers" for values in known)
            raise InputError("Sparge lam", got=got, expected="as many in each part", hint="one for each query head")
        largest = tuple(max(values[n % len(values)] for values in known) for n in range(heads))
        return largest if heads > 1 else largest[0]

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The parts that are masks."""

        return tuple(part for part in self.parts if isinstance(part, Mask))

    def __repr__(self) -> str:
        inner = [repr(part) for part in self.parts]
        inner += [f"block={self.block}"] * (self.block != (128, 128))
        inner += [f"far={self.far!r}"] * (self.far != "drop") + ["share_group=True"] * self.share_group
        return f"Select({', '.join(inner)})"


def as_select(value: Any) -> Select:
    """A Select as it is; a single part becomes one. Raises InputError."""
    if isinstance(value, Select):
        return value
    if isinstance(value, (Sparge, TopK, Threshold, Mask)):
        return Select(value)
    raise InputError(
        "select",
        got=type(value).__name__ if isinstance(value, type) or callable(value) else repr(value),
        expected="a tilewise.Select, or one of its parts: Sparge, TopK, Threshold, a Mask",
        hint="select=tilewise.Sparge(tau=0.95, theta=0.5)",
    )


def _by_head(owner: Any, name: str, field: str, low: float, high: float, open_below: bool = False) -> None:
    """Check a number, or one for each head, and keep it as floats."""
    given = getattr(owner, field)
    values = _values(given)
    if not values or not all(_within(x, low, high, open_below) for x in values):
        expected = (
            f"numbers in {'(' if open_below else '['}{low:g}, {high:g}]" if high < math.inf else f"numbers > {low:g}"
        )
        raise InputError(name, got=shown(given), expected=expected, hint="one number, or a tuple of one for each head")
    _keep(owner, field, tuple(map(float, values)) if isinstance(given, Sequence) else float(given))


def _values(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)


def _within(x: Any, low: float, high: float = 1.0, open_below: bool = True) -> bool:
    try:
        value = float(x) if isinstance(x, numbers.Real) and not isinstance(x, bool) else math.nan
    except OverflowError:  # an integer that no float holds
        value = math.inf
    return math.isfinite(value) and (low < value if open_below else low <= value) and value <= high


def _keep(owner: Any, field: str, value: Any) -> None:
    """Set a field of a frozen dataclass; a list becomes a tuple, so that owners can be hashed."""
    object.__setattr__(owner, field, tuple(value) if isinstance(value, list) else value)
