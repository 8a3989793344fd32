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
    """Tiles that hold most of a softmax over means of tiles (Zhang et al., "SpargeAttention: Accurate and Training-free
    Sparse Attention Accelerating Any Model Inference", 2025).

    A tile of queries and one of keys meet by the product of their means. Of the keys' tiles in the order of their
    softmax weights, the first ones are taken until their weights sum to `tau`. A mean says little where a tile's rows
    differ: a tile of keys whose self-similarity, the mean of all cosines between its rows, is not above `theta` is
    taken by all, and such a tile of queries takes all. Of the tiles that are taken, those whose weights turn out to be
    small once their scores are there may be left out of the sums, too (`lam`).

    Args:
        tau: in (0, 1]; 1 takes every tile. One number, or one for each query head.
        theta: in [-1, 1]; 1 takes every tile, -1 goes by means alone. One number, or one for each query head.
        lam: a tile of scores that are all more than `lam` below the largest of their rows so far counts for nothing:
            its weights are below exp(-lam) of that one's. How much that is in all grows with the sequence: with
            log(seqlen) + 7 at most a thousandth of a row's sum is left out. Which tiles these are depends on the order
            in which an implementation visits tiles, and on their size there; NaN among such scores may be left out,
            too. Nothing is where gradients are wanted. One number, or one for each query head. None, the default,
            leaves out nothing.

    Raises:
        InputError: another value.
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
    """The tiles of keys whose means have the largest products with that of a tile of queries.

    Args:
        k: how many tiles, an integer from 1 to 2**31 - 1, or what share of those that the mask lets it see, in (0, 1],
            rounded up. One number, or one for each query head.
        theta: as `Sparge` has it; -1, the default, goes by means alone.

    Raises:
        InputError: another value.
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
                hint="8 takes eight tiles, 0.25 a quarter of those that can be seen",
            )
        _keep(self, "k", self.k)

    @property
    def counts(self) -> bool:
        """Whether `k` counts tiles."""
        return isinstance(_values(self.k)[0], numbers.Integral)


@dataclass(frozen=True)
class Threshold:
    """The tiles of keys whose weight in a softmax over means of tiles is at least `weight`.

    Args:
        weight: in [0, 1]. One number, or one for each query head.
        theta: as `Sparge` has it; -1, the default, goes by means alone.

    Raises:
        InputError: another value.
    """

    weight: PerHead
    theta: PerHead = -1.0

    def __post_init__(self) -> None:
        _by_head(self, "Threshold weight", "weight", 0.0, 1.0)
        _by_head(self, "Threshold theta", "theta", -1.0, 1.0)


Prediction = Sparge | TopK | Threshold


@dataclass(frozen=True, init=False)
class Select:
    """Tiles that any of its parts takes, and what becomes of the rest.

    A tile of queries that a prediction gives nothing takes its best tile, so a query that the mask lets see a key sees
    one, unless the mask cuts that tile and hides it there.

    Args:
        parts: predictions (`Sparge`, `TopK`, `Threshold`), and Masks, which take each tile that has a pair they let
            meet: `Select(tilewise.Sparge(0.95), tilewise.window(512), tilewise.sinks(128))`.
        block: queries and keys of a tile, up to 65536, one integer for both or a pair. Kernels have tiles of 64 and
            128, and are fastest where theirs divide these.
        far: what stands for tiles that are not taken. "drop": nothing. "summary": each is one key more in the same
            softmax, the mean of its keys, with the mean of its values and log(number of keys) added to its score;
            "summary2" adds half the variance of its scores, from the variance of its keys along each dimension. Tiles
            that the mask cuts are then always taken, so that a summary is of keys that all its queries may see.
        share_group: whether the query heads of one key/value head take each other's tiles, too.

    Raises:
        InputError: another value.
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
