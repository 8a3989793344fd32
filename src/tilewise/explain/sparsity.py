"""Sparsity that your q, k and v allow: thresholds of `Sparge` for each head within a bound of the error, or a window of
`sliding_tile` for each head within a budget of work for all.

One pass over all scores (`masses`) measures the weight of each tile; the loss of a selection is then a sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.explain.accuracy import picked, relative
from tilewise.explain.masses import tile_masses
from tilewise.formula.order import grid_of
from tilewise.ops.attention.choice import classes_of, pooled
from tilewise.ops.attention.problem import make_call
from tilewise.schedule.tilemap import EMPTY, PARTIAL

THETAS = (-1.0, 0.0, 0.2, 0.4, 0.6, 0.8, 0.9)
TAUS = tuple(1.0 - (1.0 - n / 40) ** 2 for n in range(1, 41))  # close together near 1
ROUNDS = 6
SHRINK = 0.97  # aims a little below the bound
MOST_STEP = 4.0  # of the weight that may be lost, from one round to the next
NO_LAM = 1000.0  # as one of the heads' lam: weights below exp(-1000) are 0 in float64, too
Window = tuple[int, ...]


# thresholds of each head ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """Thresholds of `Sparge` for each head of a layer, and what they give.

    Attributes:
        tau, theta: the thresholds.
        density: share of the tiles that are computed.
        lost: share of the weights in the other tiles.
        errors: relative L1 error to attention over all tiles, of the worst sample.
        lams: whether the head uses `lam`: only if its error stays within the bound.
    """

    tau: tuple[float, ...]
    theta: tuple[float, ...]
    density: tuple[float, ...]
    lost: tuple[float, ...]
    errors: tuple[float, ...]
    lams: tuple[bool, ...]

    def select(self, block: tuple[int, int], far: str, lam: float | None) -> tw.Select:
        """What `attention(select=)` takes; `lam`, as it was given to the search, is of the heads that may have it."""
        return tw.Select(tw.Sparge(self.tau, self.theta, _lam_of_heads(lam, self.lams)), block=block, far=far)


def fit_sparge(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_error: float,
    *,
    mask: tw.Mask | None = None,
    scale: float | None = None,
    block: tuple[int, int] = (128, 128),
    far: str = "drop",
    lam: float | None = None,
    tiles: int | None = None,
) -> Fit:
    """Thresholds of `Sparge` for each head: the fewest tiles with a relative L1 error of at most `max_error`.

    The share of the weights that may be lost is first set to the bound, then corrected by the errors that a few runs of
    attention measure, for all heads at once. A head that no thresholds keep within the bound computes all tiles. `lam`
    is used only by heads that stay within the bound with it when all tiles are computed.

    Args:
        q, k, v, mask, scale: as `tilewise.attention` takes them, dense. Samples of a batch must all keep the bound.
        max_error: the largest relative L1 error of a head, against attention over all tiles.
        block, far, lam: as in `Select` and `Sparge`; one `lam` for all heads.
        tiles: how many tiles of queries are examined, evenly spaced; None: all. Errors are of all queries.

    Returns:
        The thresholds and what they give: tiles computed, weight lost and error, by head.

    Raises:
        InputError, FormulaError: an argument is wrong, or q, k, v or attention over them is not finite.

    Example:
        >>> from tilewise.explain.sparsity import fit_sparge
        >>> fit = fit_sparge(q, k, v, max_error=0.2, mask=tw.causal, block=(50, 50))
        >>> max(fit.errors) <= 0.2
        True
    """
    if not max_error > 0.0:
        raise InputError("max_error", got=repr(max_error), expected="a number > 0", hint="0.05 is 5 % in relative L1")
    block = tw.Select(tw.Sparge(lam=lam), block=block, far=far).block  # raises what is wrong with them
    formulas: dict[str, Any] = {"mask": mask, "scale": scale}
    with torch.no_grad():
        exact = tw.attention(q, k, v, **formulas)
        _check_finite(q=q, k=k, v=v, attention=exact)
        some = picked(-(-q.shape[1] // block[0]), tiles).to(q.device)
        masses = _of_tiles(q, k, some, block, formulas)
        lost, density = frontier(q, k, masses, some, block, far, formulas)
        heads = range(q.shape[2])
        points = [(tau, theta) for theta in THETAS for tau in TAUS]
        best, errors = [points.index((1.0, -1.0))] * len(heads), [0.0] * len(heads)  # all tiles
        lams = (lam is not None,) * len(heads)
        if lam is not None:  # leaves out small weights of all tiles, too
            every = tw.Select(tw.Sparge(1.0, -1.0, lam), block=block, far=far)
            found = by_head(tw.attention(q, k, v, select=every, **formulas), exact)
            lams = tuple((found <= max_error).tolist())
            errors = torch.where(found <= max_error, found, 0.0).tolist()
        allowed = torch.full((len(heads),), max_error)
        for _ in range(ROUNDS):
            fits = torch.where(lost <= allowed, density, torch.inf)
            chosen = fits.argmin(0).tolist()
            tau, theta = zip(*(points[n] for n in chosen), strict=True)
            select = tw.Select(tw.Sparge(tau, theta, _lam_of_heads(lam, lams)), block=block, far=far)
            found = by_head(tw.attention(q, k, v, select=select, **formulas), exact)
            for h in heads:
                if found[h] <= max_error and density[chosen[h], h] < density[best[h], h]:
                    best[h], errors[h] = chosen[h], float(found[h])
            step = (max_error / found.clamp(min=1e-30)).clamp(1 / MOST_STEP, MOST_STEP)
            allowed = (allowed * step * SHRINK).clamp(max=1.0)
    tau, theta = zip(*(points[n] for n in best), strict=True)
    shares, gone = (tuple(float(x[n, h]) for h, n in enumerate(best)) for x in (density, lost))
    return Fit(tau, theta, shares, gone, tuple(errors), lams)


def _lam_of_heads(lam: float | None, lams: tuple[bool, ...]) -> float | tuple[float, ...] | None:
    """`lam` of the heads that have it; None where none has."""
    if lam is None or not any(lams):
        return None
    return lam if all(lams) else tuple(lam if has else NO_LAM for has in lams)


def _check_finite(**tensors: torch.Tensor) -> None:
    """Raise InputError where a tensor has NaN or infinity: no error is then at most a bound."""
    for name, x in tensors.items():
        if not x.isfinite().all():
            got = f"{int(x.numel() - x.isfinite().sum())} of {x.numel()} numbers that are NaN or infinite"
            hint = "save q, k and v of a run that went well, without padding that was never written"
            raise InputError(name, got=got, expected="finite numbers", hint=hint)


def frontier(
    q: torch.Tensor,
    k: torch.Tensor,
    masses: torch.Tensor,
    some: torch.Tensor,
    block: tuple[int, int],
    far: str,
    formulas: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Weight lost by the worst sample, share of tiles computed), each (points, heads): of `TAUS` for each of `THETAS`;
    float32, on a CPU.
    """
    heads, points = q.shape[2], []
    call = make_call(q, k, k, **formulas)
    classes = classes_of(call, block)
    found = pooled(call, classes, block, alike=True)
    always = classes == PARTIAL if far != "drop" else torch.zeros_like(classes, dtype=torch.bool)
    shape = (q.shape[0], heads, *classes.shape[2:])
    seen, always = (x.expand(shape)[:, :, some] for x in (classes != EMPTY, always))
    count = seen.sum((0, 2, 3)).clamp(min=1)
    for theta, tau in itertools.product(THETAS, TAUS):
        taken = found.take(tw.Sparge(tau, theta), call).expand(shape)[:, :, some]
        kept = seen & (taken | always)
        gone = (masses * ~kept).sum(-1).mean(-1).amax(0)
        points.append((gone, kept.sum((0, 2, 3)) / count))
    lost, density = (torch.stack(x).float().cpu() for x in zip(*points, strict=True))
    return lost, density


def _of_tiles(
    q: torch.Tensor, k: torch.Tensor, some: torch.Tensor, block: tuple[int, int], formulas: dict[str, Any]
) -> torch.Tensor:
    """Weights of some tiles of queries."""
    place = torch.full((-(-q.shape[1] // block[0]),), -1, device=q.device)
    place[some] = torch.arange(len(some), device=q.device)
    of_q = place[torch.arange(q.shape[1], device=q.device) // block[0]]
    return tile_masses(q, k, of_q, torch.arange(k.shape[1], device=q.device) // block[1], **formulas)


def by_head(o: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Relative L1 errors (heads,) of the worst sample, float32, on a CPU."""
    off, size = (x.abs().double().sum((1, 3)) for x in (o - exact, exact))
    return relative(off, size).amax(0).float().cpu()


# windows of each head ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Canvas:
    """A grid of tokens in tiles, as `sliding_tile` takes them."""

    extents: tuple[int, ...]
    tile: tuple[int, ...]
    order: str = "tile"
    text: int = 0
    text_first: bool = False

    @property
    def grid(self) -> tuple[int, ...]:
        """How many tiles it has along each axis."""
        return grid_of(self.extents, self.tile)

    @property
    def tokens(self) -> int:
        return math.prod(self.extents) + self.text

    def mask(self, windows: Sequence[Window], device: torch.device | str | None = None) -> tw.Mask:
        """`sliding_tile` with a window for each head."""
        given: dict[str, Any] = {"order": self.order, "text": self.text, "text_first": self.text_first}
        return tw.sliding_tile(self.extents, self.tile, [tuple(w) for w in windows], device=device, **given)

    def tile_of(self) -> torch.Tensor:
        """The tile of each token, int64; text is one more."""
        order = tw.TokenOrder(self.extents, self.tile, self.order, self.text, self.text_first)
        assert order.tile_of is not None
        found = order.tile_of.long()
        return torch.where(found < 0, math.prod(self.grid), found)

    def windows(self) -> list[Window]:
        """Those with an odd number of tiles, or all, along each axis."""
        sides = [sorted({*range(1, n + 1, 2), n}) for n in self.grid]
        return list(itertools.product(*sides))


def window_losses(
    q: torch.Tensor, k: torch.Tensor, canvas: Canvas, windows: Sequence[Window], *, scale: float | None = None
) -> torch.Tensor:
    """What share of a head's weights lies outside each window, of the worst sample: float32 (heads, windows).

    Args:
        q, k: (batch, tokens, heads, dim), in the order of the canvas.
        windows: in tiles.

    Raises:
        InputError: the tokens are not those of the canvas or not finite, or a window is none of it.
    """
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] != canvas.tokens:
            hint = "text counts, too"
            raise InputError(name, got=f"{x.shape[1]} tokens", expected=f"{canvas.tokens} of {canvas}", hint=hint)
    _check_finite(q=q, k=k)
    of = canvas.tile_of()
    masses = tile_masses(q, k, of, of, scale=scale).cpu()
    counts = torch.bincount(of, minlength=masses.shape[2]).float()
    weights = masses * (counts / counts.sum())[:, None]
    unseen = torch.stack([~seen_tiles(canvas, window) for window in windows]).float()
    return torch.einsum("bhqk,wqk->bhw", weights, unseen).amax(0)


def window_costs(canvas: Canvas, windows: Sequence[Window]) -> torch.Tensor:
    """What share of all pairs of tokens each window sees: float64 (windows,)."""
    counts = torch.bincount(canvas.tile_of()).double()
    pairs = torch.outer(counts, counts) / counts.sum() ** 2
    return torch.stack([(pairs * seen_tiles(canvas, window)).sum() for window in windows])


def seen_tiles(canvas: Canvas, window: Window) -> torch.Tensor:
    """Which tiles see which: bool (tiles, tiles), text one more: the window over a canvas of one token a tile."""
    text = canvas.text > 0
    small = tw.sliding_tile(canvas.grid, 1, tuple(window), order="raster", text=int(text))
    place = torch.arange(math.prod(canvas.grid) + text)
    return small.evaluate(h=torch.tensor(0), i=place[:, None], j=place).expand(len(place), len(place))


def spend(losses: torch.Tensor, costs: torch.Tensor, budget: float) -> list[int]:
    """For each head one of the windows, so that their mean cost is at most `budget` and the sum of losses small.

    A price of work is found at which heads, each for itself, take what they can pay together; what is left goes to the
    largest gains that fit (Everett, "Generalized Lagrange multiplier method", 1963). The sum is within the gain of one
    head's step of the least.

    Args:
        losses: (heads, windows).
        costs: (windows,).

    Raises:
        InputError: no window is cheap enough.
    """
    losses, costs = losses.double(), costs.double()
    limit = budget * len(losses) * (1 + 1e-12)
    if float(costs.min()) * len(losses) > limit:
        raise InputError(
            "budget", got=f"{budget:g}", expected=f"at least {float(costs.min()):.4f}, the smallest window's share",
            hint="or name a smaller window",
        )  # fmt: skip

    def at(price: float) -> torch.Tensor:
        return (losses + price * costs).argmin(1)

    low, high = 0.0, 1e6  # at which every head takes the cheapest
    for _ in range(80):
        price = (low + high) / 2
        low, high = (price, high) if costs[at(price)].sum() > limit else (low, price)
    chosen = at(high)
    while True:
        left = limit - float(costs[chosen].sum())
        gains = losses.gather(1, chosen[:, None]) - losses
        fits = costs - costs[chosen][:, None] <= left
        gains = torch.where(fits, gains, 0.0)
        best = int(gains.argmax())
        head, window = divmod(best, len(costs))
        if gains[head, window] <= 0.0:
            return [int(n) for n in chosen]
        chosen[head] = window


def window_errors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: tw.Mask, *, scale: float | None = None
) -> tuple[float, ...]:
    """Relative L1 errors of attention under a mask to attention without, by head, of the worst sample."""
    with torch.no_grad():
        found = by_head(tw.attention(q, k, v, mask=mask, scale=scale), tw.attention(q, k, v, scale=scale))
    return tuple(found.tolist())
