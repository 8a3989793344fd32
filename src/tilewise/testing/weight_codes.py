"""Models in float64 of weights of attention over codes, as kernels multiply values by them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tilewise.quant import Quantized
from tilewise.quant.schemes import KEYS, QUERIES

LINE = 0.081  # what an exponent's code changes a weight by, relatively, at most
LINE_LEAST = 0.0086  # and below FP8's normal numbers, where the line falls faster than the weight
CENTRE, LARGEST_CODE, FALL = 0.4566, 126, 32.0  # of `gluon_sm90_weight_codes` and `gluon_sm90_codes`
LINE_OF_KEPT = 0.117  # and where of an integer score the upper bits are kept
LEAST_OF_KEPT = 0.0093
UNIT, MOST_CODES, LEAST_CODES = 256.0, 1.0, 126.1 / 2047.0  # of `gluon_sm90_half_codes`
BESIDE = 128  # channels of values, at most, whose output Hopper's kernel makes beside the next scores


def _tiles(scores: torch.Tensor, keys: int, fall: float) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Scores of a tile, the level from which kernels count them, which is the tile's largest, but at most `fall` below
    the largest so far, and what it is at least.
    """
    most = torch.full_like(scores[..., :1], -torch.inf)
    for part in torch.split(scores, keys, -1):
        of_tile = part.amax(-1, keepdim=True)
        most = torch.maximum(most, of_tile)
        level = torch.maximum(of_tile, most - fall)
        yield part, torch.where(level == -torch.inf, 0.0, level), most - fall


def exponent_codes(
    scores: torch.Tensor, largest: float, keys: int = KEYS, off: float = 0.0, worth: torch.Tensor | None = None
) -> torch.Tensor:
    """The weights 2 ** scores that `gluon_sm90_codes` multiplies values by where no gradient is wanted, but for
    roundings of float32: a model of `gluon_sm90_weight_codes` and, with `worth`, of `gluon_sm90_half_codes` in float64.

    Args:
        scores: (..., queries, keys), or (keys,), in base 2; -inf is hidden.
        largest: what the largest weight of a tile becomes.
        keys: of a tile.
        off: of scores before they become codes, from what they are.
        worth: (..., queries, keys) what an integer is worth of which `scores` are made. Nothing is hidden then.
    """
    parts = []
    near = None if worth is None else _near(worth, keys)
    for t, (part, level, least) in enumerate(_tiles(scores, keys, FALL)):
        code = 8 * (part - level + off + math.log2(largest) + 7) - CENTRE
        code = torch.round((code / LARGEST_CODE).clamp(0, 1).half().double() * LARGEST_CODE)
        if worth is not None and near is not None:
            of_tile = worth[..., t * keys : (t + 1) * keys]
            of_kept, level_of_kept = _codes_of_kept(part / of_tile, of_tile, least, largest, off)
            code = torch.where(near[..., t, None], of_kept, code)
            level = torch.where(near[..., t, None], level_of_kept, level)
        power, rest = code // 8, code % 8
        of_code = torch.where(power == 0, rest / 8 * 2.0**-6, (1 + rest / 8) * torch.exp2(power - 7))
        parts.append(of_code / largest * torch.exp2(level))
    return torch.cat(parts, -1)


def _near(worth: torch.Tensor, keys: int) -> torch.Tensor:
    """(..., queries, tiles): whose weights are those of what is kept of integers. A tile that ends before it is full
    comes first, else the first does; and what comes first never is, nor is what comes behind one that is not.
    """
    found = []
    whole = worth.shape[-1] % keys == 0
    for rows in torch.split(worth, QUERIES, -2):
        near = torch.ones_like(rows[..., 0, 0], dtype=torch.bool)
        tiles = []
        for t, part in enumerate(torch.split(rows, keys, -1)):
            if (whole and t == 0) or part.shape[-1] < keys:
                tiles.append(torch.zeros_like(near))
                continue
            slopes = 8 * UNIT * part
            near = near & (slopes.amin((-1, -2)) >= LEAST_CODES) & (slopes.amax((-1, -2)) <= MOST_CODES)
            tiles.append(near)
        found.append(torch.stack(tiles, -1)[..., None, :].expand(*rows.shape[:-1], len(tiles)))
    return torch.cat(found, -2)


def _codes_of_kept(
    integers: torch.Tensor, worth: torch.Tensor, least: torch.Tensor, largest: float, off: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a tile of integers, of which the upper bits are kept, and what they are counted from, `least` or more.
    With `off` zeros and slopes are as far from what they are as float32 may leave them.
    """
    kept, unit = torch.floor(torch.round(integers) / UNIT), UNIT * worth
    above = math.log2(largest) + 7 - CENTRE / 8  # exponents from a code of 0 to `largest`
    span = math.floor(8 * above) / 8
    level = torch.maximum(((kept + 0.5) * unit).amax(-1, keepdim=True) + above - span, least)
    inexact = math.copysign(2.0**-21, off) if off else 0.0
    zero = (level - above - off) / unit - 0.5
    zero = zero - inexact * zero.abs()
    tilt = torch.round(zero) - zero
    slope = 8 * unit * (1 + tilt * unit / span) * (1 + inexact)
    return torch.round((kept - torch.round(zero)).clamp(min=0.0) * slope.half().double()), level


def rounded_weights(
    x: Quantized, off: float = 0.0, keys: int = KEYS, fall: float = FALL, dtype: torch.dtype = torch.float8_e4m3fn
) -> torch.Tensor:
    """The weights that kernels multiply values by where sums have them before they are rounded, as `hopper_weights`.
    With a `fall` of 0 they are counted from the largest so far.
    """
    parts = []
    largest = x.scheme.p_largest if x.scheme.pv == "fp8" else 1.0
    for part, level, _ in _tiles(scores_of(x), keys, fall):
        w = torch.exp2((part - level + off).clamp(max=0.0)) * largest
        parts.append(w.float().to(dtype).double() / largest * torch.exp2(level))
    return torch.cat(parts, -1)


def hopper_weights(x: Quantized, off: float = 0.0) -> torch.Tensor:
    """(batch, heads, queries, keys): `exponent_codes` of every query and key, with as many heads of keys as of
    queries.
    """
    s = scores_of(x)
    if x.scheme.qk == "fp8" or x.v.shape[-2] > BESIDE:
        return exponent_codes(s, x.scheme.p_largest, off=off)
    of_rows = [
        (x.rows(side, torch.float64).abs().amax(-1) / codes.double().abs().amax(-1)).transpose(1, 2)
        for side, codes in (("q", x.q), ("k", x.k))
    ]
    worth = of_rows[0][..., None] * of_rows[1][..., None, :] * (math.log2(math.e) / math.sqrt(x.q.shape[-1]))
    integers = torch.einsum("bihd,bjhd->bhij", x.q.double(), x.k.double())
    alike = s[..., :1] - (integers * worth)[..., :1]  # what centring took out of all scores of a query
    return exponent_codes(integers * worth, x.scheme.p_largest, off=off, worth=worth) * torch.exp2(alike)


def by_exponents(x: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) in float64 where weights are `hopper_weights`, and so is what divides them."""
    w = hopper_weights(x)
    total = w.sum(-1, keepdim=True)
    return weighed(x, w / total), math.log(2.0) * total[..., 0].log2()


def scores_of(x: Quantized) -> torch.Tensor:
    """(batch, heads, queries, keys) in base 2."""
    q, k, _ = x.numbers()
    return torch.einsum("bihd,bjhd->bhij", q, k) * (math.log2(math.e) / math.sqrt(x.q.shape[-1]))


def weighed(x: Quantized, w: torch.Tensor) -> torch.Tensor:
    """o of weights whose sum is 1."""
    o = torch.einsum("bhij,bjhd->bihd", w, x.values(torch.float64))
    if x.v_mean is not None:
        o += x.v_mean.double()[:, None]
    return o


def cut_sums(w: torch.Tensor, x: torch.Tensor, bits: int = 13) -> torch.Tensor:
    """w (..., queries, keys) times x (..., keys, columns) as Hopper's tensor cores sum products of FP8 of a tile: of 32
    keys at a time each product, and the sum before them, is cut `bits` behind the point of the largest.
    """
    total = torch.zeros(*w.shape[:-1], x.shape[-1], dtype=torch.float64, device=w.device)
    for of_tile, rows in zip(torch.split(w, KEYS, -1), torch.split(x, KEYS, -2), strict=True):
        found = torch.zeros_like(total)
        for part, values in zip(torch.split(of_tile, 32, -1), torch.split(rows, 32, -2), strict=True):
            products = part[..., None] * values[..., None, :, :]
            largest = torch.maximum(products.abs().amax(-2), found.abs())
            step = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-900))) - bits)
            found = ((products / step[..., None, :]).trunc().sum(-2) + (found / step).trunc()) * step
        total += found
    return total
