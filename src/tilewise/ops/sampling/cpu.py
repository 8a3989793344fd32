"""Sampling in PyTorch, some rows at a time. Penalties touch the tokens of a history alone, top-p sorts no more than it
keeps, and noise is made for tokens that can still win: a Gumbel variable of 32 bits has a largest and a least value.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tilewise.ops.sampling.cpu_noise import gumbel, words
from tilewise.ops.sampling.problem import GREEDY_BELOW, LARGEST_NOISE, LEAST_NOISE, Call

Tensors = dict[str, torch.Tensor]

_ELEMENTS = 2**19  # of the logits that are worked on at once
_SORTED = (64, 1024)  # how many of the largest logits are looked at, until top-p has enough
_BINS = 1024  # of distances up to 32
_COUNTERS = 2**14  # of Philox at once, whose numbers fit into a cache


def forward(call: Call, results: Tensors) -> None:
    """Fills the results."""
    rows, width = call.logits.shape
    step = max(1, _ELEMENTS // width)
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        _rows(call, some, {name: x[some] for name, x in results.items()})


def _rows(call: Call, some: slice, results: Tensors) -> None:
    x = call.logits[some].float()
    y = _processed(call, some, x)
    top = y.amax(1)
    failed = ~((top < math.inf) & ((x.amax(1) if y is not x else top) < math.inf))
    if call.greedy:
        drawn = torch.zeros_like(failed)
    elif call.temperature is None:
        drawn = torch.ones_like(failed)
    else:
        drawn = call.temperature[some] >= GREEDY_BELOW
    z = y
    if call.temperature is not None:
        z = y / torch.where(drawn, call.temperature[some], 1.0)[:, None]
    if call.truncates:
        z = _truncated(call, some, y, top, drawn, z)
    # the first of equal ones; rows that draw are chosen below
    best = torch.zeros_like(top, dtype=torch.int64) if bool(drawn.all()) else z.argmax(1)
    if not call.greedy:
        _draw(call, some, z, drawn, best, results["values"])
    values = results["values"]
    values.copy_(torch.where(drawn, values, z.gather(1, best[:, None])[:, 0]).masked_fill_(failed, math.nan))
    none = failed | (top == -math.inf)
    logs = z if call.processed else x
    largest = logs.amax(1, keepdim=True)
    largest = largest.where(largest != -math.inf, 0.0)
    total = (logs - largest).exp_().sum(1, keepdim=True).log_()  # added to the largest logit it could be lost
    results["tokens"].copy_((best + call.first_token).masked_fill_(none, -1))
    results["logprobs"].copy_((logs.gather(1, best[:, None]) - largest - total)[:, 0].masked_fill_(none, math.nan))
    if call.top >= 0:
        _list(call, logs, (largest, total), none, results)


# processed logits ----------------------------------------------------------------------------------------------------


def _processed(call: Call, some: slice, x: torch.Tensor) -> torch.Tensor:
    """Logits after penalties, bias and bans, float32; x itself where there are none."""
    if call.history is None and call.bias_tokens is None and call.allowed is None:
        return x
    y = x.clone()
    if call.history is not None:
        for row in range(some.start, some.stop):
            _penalise(call, row, y[row - some.start])
    if call.bias_tokens is not None and call.bias_values is not None:
        column = call.bias_tokens[some].long() - call.first_token
        at, place = ((call.bias_tokens[some] >= 0) & (column >= 0) & (column < y.shape[1])).nonzero(as_tuple=True)
        y.index_put_((at, column[at, place]), call.bias_values[some][at, place], accumulate=True)
    if call.allowed is not None:
        masks = call.allowed[some] if call.mask_of is None else call.allowed[call.mask_of[some].clamp(min=0).long()]
        bits = _BITS[masks.contiguous().view(torch.uint8).long()].flatten(1)[:, : y.shape[1]]
        if call.mask_of is not None:
            bits = bits | (call.mask_of[some] < 0)[:, None]
        y.masked_fill_(~bits, -math.inf)
    return y


_BITS = ((torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu")) & 1).bool()  # of each byte


def _penalise(call: Call, row: int, y: torch.Tensor) -> None:
    """Penalties on the logits of one row, in place."""
    assert call.history is not None
    assert call.prompt_lengths is not None
    assert call.lengths is not None
    p, f, q = (None if x is None else float(x[row]) for x in (call.repetition, call.frequency, call.presence))
    if p in (None, 1.0) and not f and not q:
        return
    request = row if call.request is None else int(call.request[row])
    tokens = call.history[request, : int(call.lengths[request])].long() - call.first_token
    output = (torch.arange(len(tokens)) >= int(call.prompt_lengths[request])).float()
    inside = (tokens >= 0) & (tokens < len(y))
    found, place = tokens[inside].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    count = torch.zeros(len(found)).index_add_(0, place, output[inside])
    x = y[found]
    if p is not None:
        x = torch.where(x > 0, x / p, x * p)
    if f is not None:
        x = x - f * count
    if q is not None:
        x = x - q * (count > 0)
    y[found] = x


# truncation ----------------------------------------------------------------------------------------------------------


def _truncated(
    call: Call, some: slice, y: torch.Tensor, top: torch.Tensor, drawn: torch.Tensor, z: torch.Tensor
) -> torch.Tensor:
    """z without what top-k, top-p and min_p leave out of the rows that draw."""
    temperature = torch.ones_like(top) if call.temperature is None else call.temperature[some]
    temperature = torch.where(drawn, temperature, 1.0).double()
    keep = ~drawn[:, None]
    if call.top_k is not None or call.top_p is not None:
        keep = keep | _first_ones(call, some, y, top, temperature)
    if call.min_p is not None:
        least = top + temperature * call.min_p[some].double().log()
        inside = ~drawn[:, None] | (y >= least[:, None])
        keep = inside if call.top_k is None and call.top_p is None else keep & inside
    return z.masked_fill(~keep, -math.inf)


def _first_ones(call: Call, some: slice, y: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """What top-k and then top-p keep: of logits in falling order, the lowest index first among equals, so many that
    `least` is the last of them and `ties` are equal to it.
    """
    width = y.shape[1]
    k = torch.full_like(top, width, dtype=torch.int64)
    if call.top_k is not None:
        given = call.top_k[some].long()
        k = torch.where((given > 0) & (given < width), given, width)
    p = torch.ones_like(top) if call.top_p is None else call.top_p[some]
    number, least = torch.where(k < width, k, 1), top.clone()
    waiting = ((k < width) | (p < 1.0)) & top.isfinite()
    for count in _SORTED:
        row = waiting.nonzero()[:, 0]
        if not len(row):
            break
        found, last, done = _of_largest(y[row], min(count, width), k[row], p[row], top[row], temperature[row])
        number[row], least[row], waiting[row] = found, last, ~done
    for n in waiting.nonzero()[:, 0].tolist():
        number[n], least[n] = _of_row(y[n], int(k[n]), float(p[n]), float(top[n]), float(temperature[n]))
    least = least[:, None]
    above = y > least
    ties = y == least
    wanted = number[:, None] - above.sum(1, keepdim=True)
    if bool((ties.sum(1, keepdim=True) > wanted).any()):
        ties &= ties.cumsum(1) <= wanted
    everything = ((k == width) & (p >= 1.0))[:, None]
    return above | ties | everything


def _of_largest(
    y: torch.Tensor, count: int, k: torch.Tensor, p: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(How many are kept, the last logit of these, whether the `count` largest logits were enough to say so)"""
    width = y.shape[1]
    first, rank = y.topk(count).values, torch.arange(count)
    weights = ((first - top[:, None]).double() / temperature[:, None]).exp_().nan_to_num_()
    weights = torch.where(rank < k[:, None], weights, 0.0)
    total = weights.sum(1)
    whole = (k == width).nonzero()[:, 0]
    if len(whole):
        each = (y[whole] - top[whole, None]) / temperature[whole, None].float()
        total[whole] = each.exp_().nan_to_num_().sum(1, dtype=torch.float64)
    sums, enough = weights.cumsum(1), p.double() * total
    cut = p < 1.0
    number = ((sums - weights < enough[:, None]) & (rank < k[:, None])).sum(1).clamp(min=1)
    number = torch.where(cut, number, k.clamp(max=count))
    done = torch.where(k < width, k <= count, (sums[:, -1] >= enough) | (count == width))
    return number, first.gather(1, number[:, None] - 1)[:, 0], done


def _of_row(y: torch.Tensor, k: int, p: float, top: float, temperature: float) -> tuple[int, float]:
    """(How many are kept, the last logit of these) of one row. Where many are, only those are sorted whose distance
    from the largest is about that of the last.
    """
    distance = (top - y.double()) / temperature
    weights = distance.neg().exp_().nan_to_num_()
    if k < len(y):
        first, where = y.topk(k)
        weights, before, passed = weights[where], 0.0, 0
        enough = p * float(weights.sum())
    else:
        bins = distance.mul_(_BINS / 32).nan_to_num_().clamp_(0, _BINS).long()
        mass = bins.bincount(weights, _BINS + 1)
        enough = p * float(mass.sum())
        last = min(int((mass.cumsum(0) < enough).sum()), _BINS)
        first, where = y[bins == last].sort(descending=True)
        weights, before, passed = weights[bins == last][where], float(mass[:last].sum()), int((bins < last).sum())
    if not len(first):  # the sum of all is less than p of it, by rounding
        return len(y), -math.inf
    number = int((before + weights.cumsum(0) - weights < enough).sum()) if p < 1.0 else k
    number = max(number, 1)
    return passed + number, float(first[number - 1])


# the draw ------------------------------------------------------------------------------------------------------------


def _draw(
    call: Call, some: slice, z: torch.Tensor, drawn: torch.Tensor, best: torch.Tensor, values: torch.Tensor
) -> None:
    """Writes the perturbed value that wins, and its column into `best`, for rows that draw."""
    assert call.seeds is not None
    assert call.positions is not None
    row = drawn.nonzero()[:, 0]
    if not len(row):
        return
    z = z if len(row) == len(z) else z[row]
    seeds, positions = call.seeds[some][row], call.positions[some][row].long()
    # a word of four that Philox makes is a token's: groups of four begin at multiples of four of the whole vocabulary
    lead = call.first_token % 4
    groups = F.pad(z, (lead, -(lead + z.shape[1]) % 4), value=-math.inf).reshape(len(z), -1, 4)
    largest = groups.amax(2)
    hopeful = largest >= largest.amax(1, keepdim=True) - (LARGEST_NOISE - LEAST_NOISE)
    first = call.first_token // 4
    if 2 * int(hopeful.count_nonzero()) > hopeful.numel():
        number = torch.arange(first, first + groups.shape[1])[None]
        value, place = torch.empty(len(row)), torch.empty(len(row), dtype=torch.int64)
        step = max(1, _COUNTERS // groups.shape[1])
        for n in range(0, len(row), step):
            some_rows = slice(n, n + step)
            noise = gumbel(words(seeds[some_rows, None], positions[some_rows, None], number))
            torch.max(noise.add_(groups[some_rows]).flatten(1), 1, out=(value[some_rows], place[some_rows]))
    else:
        of, group = hopeful.nonzero(as_tuple=True)
        noise = groups[of, group]
        for n in range(0, len(of), _COUNTERS):
            part = slice(n, n + _COUNTERS)
            noise[part] += gumbel(words(seeds[of[part]], positions[of[part]], group[part] + first))
        value = torch.full((len(row),), -math.inf).scatter_reduce_(0, of, noise.amax(1), "amax")
        index = 4 * group[:, None] + torch.arange(4)
        index = torch.where(noise == value[of][:, None], index, groups[0].numel()).amin(1)
        place = torch.full((len(row),), groups[0].numel()).scatter_reduce_(0, of, index, "amin")
    values[row] = value
    best[row] = (place - lead).clamp(0, z.shape[1] - 1)


def _list(
    call: Call, logs: torch.Tensor, sums: tuple[torch.Tensor, torch.Tensor], none: torch.Tensor, results: Tensors
) -> None:
    """Writes the most likely tokens, the lowest index first among equals."""
    tokens, found = results["top_tokens"], results["top_logprobs"]
    if not call.top:
        return
    column = logs.topk(call.top).indices.sort(1).values
    least = logs.gather(1, column).amin(1, keepdim=True)
    for row in ((logs >= least).sum(1) > call.top).nonzero()[:, 0].tolist():  # others are equal to the last
        above, equal = (logs[row] > least[row]).nonzero()[:, 0], (logs[row] == least[row]).nonzero()[:, 0]
        column[row] = torch.cat([above, equal[: call.top - len(above)]]).sort().values
    order = logs.gather(1, column).argsort(dim=1, descending=True, stable=True)
    column = column.gather(1, order)
    found.copy_(logs.gather(1, column) - sums[0] - sums[1])
    tokens.copy_(torch.where(found == -math.inf, -1, column + call.first_token))
    tokens.masked_fill_(none[:, None], -1)
    found.masked_fill_(none[:, None], math.nan)
