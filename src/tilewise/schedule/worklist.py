"""Who does which tile: all tiles of a batch, whatever its lengths, in one line that programs divide evenly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tilewise.core.errors import InputError
from tilewise.formula.evaluate import evaluate
from tilewise.formula.formula import as_mask
from tilewise.schedule.rule import tile_rule
from tilewise.schedule.sharing import Group

Array = np.ndarray[Any, np.dtype[np.int64]]


class Segment(NamedTuple):
    """What a program does without a break: key tiles `first` to `end` (excluded) of one unit for one head."""

    unit: int
    head: int
    first: int
    end: int


class Merge(NamedTuple):
    """A row of tiles that several programs share, and the slots of its partial results in order. Program p leaves what
    it only ends in slot 2 p, and what it begins and others end in slot 2 p + 1.
    """

    unit: int
    head: int
    slots: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class WorkList:
    """Units of work and how programs divide them: the host's twin of what kernels plan on a device.

    A unit is a tile of one request's queries (rows of queries and heads of a group), with the run of key tiles that any
    of its rows sees, at least one. For each key/value head, its tiles stand in line behind those of the head before,
    and behind those of all units before. Of `programs` the p-th takes the positions from p W / P to (p + 1) W / P of
    the line's W, P being no more than W (Stream-K, Osama et al. 2023).

    Attributes:
        request, tile: of each unit, which request and which of its tiles.
        begin, count: of each unit, the first key tile and how many.
        heads: key/value heads. programs: how many share the work.
        prefix: of each unit, how many units before it the one of the prefix stands that its request shares, 0 of none;
            -1 of a prefix's own unit, whose rows are those of several requests, from `request` on.
    """

    request: Array
    tile: Array
    begin: Array
    count: Array
    heads: int
    programs: int
    prefix: Array

    @staticmethod
    def build(
        seqlens_q: Any,
        seqlens_k: Any,
        *,
        heads_q: int,
        heads_kv: int,
        programs: int,
        rows: int = 16,
        block_n: int = 64,
        mask: Any = None,
        groups: Sequence[Group] = (),
        together: int = 1,
    ) -> WorkList:
        """Divide a batch of requests.

        Args:
            seqlens_q, seqlens_k: integers (batch,), queries and keys of each request; the last query stands at the last
                key.
            heads_q, heads_kv: heads, of which a group's share a tile.
            programs: how many share the work.
            rows, block_n: rows of a tile (queries times heads of a group) and its keys.
            mask: as `attention` takes it; masks that are no run visit every tile.
            groups: requests that share prefixes (`schedule.sharing.groups_of`), of which the rows of `together` make a
                tile; all requests have then one tile.

        Raises:
            InputError: a size is not positive, lengths differ in number, or requests that share have several tiles or
                do not see the first keys.
        """
        queries, keys = (np.asarray(x, dtype=np.int64).reshape(-1) for x in (seqlens_q, seqlens_k))
        for name, size in {"programs": programs, "rows": rows, "block_n": block_n, "heads_kv": heads_kv}.items():
            if size < 1:
                raise InputError(name, got=size, expected="1 or more", hint="sizes of tiles, heads and programs")
        if queries.shape != keys.shape or heads_q % heads_kv:
            got = f"{queries.size} and {keys.size} lengths, {heads_q} heads on {heads_kv}"
            raise InputError("seqlens", got=got, expected="one of each for a request, whole groups", hint="see build")
        group = heads_q // heads_kv
        tiles = -(-queries * group // rows)
        request = np.repeat(np.arange(queries.size), tiles)
        tile = np.arange(request.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        seen = keys[request]
        begin, end = np.zeros_like(seen), -(-seen // block_n)
        if mask is not None:
            shift = (keys - queries)[request]
            first = tile * rows // group + shift
            last = (np.minimum((tile + 1) * rows, queries[request] * group) - 1) // group + shift
            begin, end = _visited(mask, request, heads_q, first, last, seen, block_n)
        work = WorkList(request, tile, begin, np.maximum(end - begin, 1), heads_kv, programs, np.zeros_like(request))
        return work._sharing(groups, together) if groups else work

    def _sharing(self, groups: Sequence[Group], together: int) -> WorkList:
        """With the prefixes of `groups` in units of their own, each before the units of those that share it."""
        if self.tile.any() or self.tile.size != self.request.max() + 1:
            got = f"{self.tile.max() + 1} tiles"
            raise InputError(
                "groups", got=got, expected="one tile for each request", hint="fewer queries, or more rows"
            )
        if self.begin.any():
            got = "a mask that hides first keys"
            raise InputError("groups", got=got, expected="runs that begin at key 0", hint="causal, or no mask")
        begin, count, prefix = self.begin.copy(), self.count.copy(), self.prefix.copy()
        heads, tiles = [], []
        for group in groups:
            those = np.arange(group.first, group.first + group.requests)
            begin[those] += group.tiles
            count[those] -= group.tiles
            prefix[those] = np.arange(group.requests) % together + 1
            heads += those[::together].tolist()
            tiles += [group.tiles] * -(-group.requests // together)
        at = np.array(heads)
        return WorkList(
            np.insert(self.request, at, at), np.insert(self.tile, at, 0), np.insert(begin, at, 0),
            np.insert(count, at, tiles), self.heads, self.programs, np.insert(prefix, at, -1),
        )  # fmt: skip

    @property
    def work(self) -> int:
        """Tiles of all units and heads."""
        return int(self.count.sum()) * self.heads

    @property
    def starts(self) -> Array:
        """The first position of each program, and the end of the line: (programs + 1,)."""
        busy = min(self.programs, self.work)
        p = np.arange(self.programs + 1)
        return np.where(p < busy, p * self.work // max(busy, 1), self.work)

    def places(self, positions: Array) -> tuple[Array, Array, Array]:
        """(unit, head, tile of the unit's run) of positions in the line; the end of the line is one more unit's."""
        counts = np.append(self.count, 1)
        before = np.append(0, np.cumsum(self.count)) * self.heads
        unit = np.searchsorted(before, positions, side="right") - 1
        rest = positions - before[unit]
        return unit, rest // counts[unit], rest % counts[unit]

    def segments(self, program: int) -> Iterator[Segment]:
        """What one program does, in order."""
        position, stop = (int(x) for x in self.starts[program : program + 2])
        while position < stop:
            unit, head, first = (int(x[0]) for x in self.places(np.array([position])))
            end = min(int(self.count[unit]), first + stop - position)
            yield Segment(unit, head, first, end)
            position += end - first

    def merges(self) -> list[Merge]:
        """The rows of tiles that are cut between programs."""
        parts: dict[tuple[int, int], list[int]] = {}
        for program in range(self.programs):
            for unit, head, first, end in self.segments(program):
                if end - first < self.count[unit]:
                    parts.setdefault((unit, head), []).append(2 * program + (first == 0))
        return [Merge(unit, head, tuple(slots)) for (unit, head), slots in parts.items()]


def _visited(
    mask: Any, request: Array, heads: int, first: Array, last: Array, keys: Array, block_n: int
) -> tuple[Array, Array]:
    """First and end of the key tiles that any of the queries first .. last sees, for any head."""
    bound = as_mask(mask).bound
    rule = tile_rule(bound.text)
    if rule.spans is None:
        return np.zeros_like(keys), -(-keys // block_n)
    low, high = rule.spans["i"][0][:2]  # that any query sees
    at = {name: torch.as_tensor(x)[None] for name, x in (("b", request), ("i0", first), ("i1", last))}
    at["h"] = torch.arange(heads if rule.by_head else 1)[:, None]
    found = evaluate([low, high], at, bound.tensors, bound.numbers)
    begin, end = (x.expand(at["h"].shape[0], keys.size).numpy() for x in found)
    begin, end = np.maximum(begin, 0), np.minimum(end, keys - 1)
    sees = end >= begin
    begin = np.where(sees, begin // block_n, np.iinfo(np.int64).max).min(0, initial=np.iinfo(np.int64).max)
    end = np.where(sees, end // block_n + 1, 0).max(0, initial=0)
    return np.where(end > 0, begin, 0), end
