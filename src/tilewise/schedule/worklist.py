"""Who does which tile: all tiles of a batch, whatever its lengths, in one line that programs divide evenly."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tilewise.core.errors import InputError, shown
from tilewise.formula.evaluate import evaluate
from tilewise.formula.formula import as_mask
from tilewise.schedule.rule import tile_rule
from tilewise.schedule.sharing import Group, programs_of_lines

Array = np.ndarray[Any, np.dtype[np.int64]]


class Segment(NamedTuple):
    """What a program does without a break: key tiles `first` to `end` (excluded) of one unit for one head."""

    unit: int
    head: int
    first: int
    end: int


class Merge(NamedTuple):
    """A row of tiles that several programs share, and the slots of its partial results in order. Program p leaves what
    it only ends in slot 2 p, and what it begins in slot 2 p + 1. Behind a prefix whole rows are merged, too, with what
    the programs `prefix` of that line left.
    """

    unit: int
    head: int
    slots: tuple[int, ...]
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class WorkList:
    """Units of work and how programs divide them: the host's twin of what kernels plan on a device.

    A unit is a tile of one request's queries (rows of queries and heads of a group), with the run of key tiles that any
    of its rows sees, at least one. For each key/value head, its tiles stand in line behind those of the head before,
    and behind those of all units before. Of P `programs` the first W mod P take W // P + 1 of the line's W positions,
    the others W // P, P being no more than W (Stream-K, Osama et al. 2023).

    Attributes:
        request, tile: of each unit, which request and which of its tiles.
        begin, count: of each unit, the first key tile and how many.
        heads: key/value heads. programs: how many share the work.
        prefixes: prefixes that requests share, which are done before: a line whose units have the rows of several
            requests, from `request` on.
        prefix: of each unit, which of those its request shares, -1 of none.
    """

    request: Array
    tile: Array
    begin: Array
    count: Array
    heads: int
    programs: int
    prefix: Array
    prefixes: WorkList | None = None

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
        prefix_n: int | None = None,
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
            prefix_n: keys of a tile of theirs, where not `block_n`.

        Raises:
            InputError: a size is not positive, lengths differ in number, or requests that share have several tiles or
                do not see the first keys.
        """
        try:
            queries, keys = (np.asarray(x, dtype=np.int64).reshape(-1) for x in (seqlens_q, seqlens_k))
        except OverflowError as error:
            got, hint = "a length beyond 64 bits", "tokens of each request"
            raise InputError("seqlens", got=got, expected="integers below 2**31", hint=hint) from error
        sizes = {"programs": programs, "rows": rows, "block_n": block_n, "heads_q": heads_q, "heads_kv": heads_kv}
        for name, size in sizes.items():
            if not 1 <= size < 2**31:
                raise InputError(name, got=shown(size), expected="1 to 2**31 - 1", hint="tiles, heads and programs")
        if queries.shape != keys.shape or heads_q % heads_kv:
            got = f"{queries.size} and {keys.size} lengths, {heads_q} heads on {heads_kv}"
            raise InputError("seqlens", got=got, expected="one of each for a request, whole groups", hint="see build")
        group = heads_q // heads_kv
        request, seen = np.arange(queries.size), keys
        tile = np.zeros_like(request)
        if queries.size and not (queries.min() > 0 and queries.max() * group <= rows):  # not a tile for each
            tiles = -(-queries * group // rows)
            request = np.repeat(request, tiles)
            tile = np.arange(request.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)
            seen = keys[request]
        begin, end = np.zeros_like(seen), (seen + (block_n - 1)) // block_n
        if mask is not None:
            shift = (keys - queries)[request]
            first = tile * rows // group + shift
            last = (np.minimum((tile + 1) * rows, queries[request] * group) - 1) // group + shift
            begin, end = _visited(mask, request, heads_q, first, last, seen, block_n)
            end -= begin
        count, prefix = np.maximum(end, 1), np.full(request.size, -1)
        work = WorkList(request, tile, begin, count, heads_kv, programs, prefix)
        return work._sharing(groups, together, block_n, prefix_n or block_n) if groups else work

    def _sharing(self, groups: Sequence[Group], together: int, block_n: int, prefix_n: int) -> WorkList:
        """With the prefixes of `groups` in a line of their own."""
        if not self.tile.size or self.tile.any() or self.tile.size != self.request.max() + 1:
            got = f"{self.tile.max(initial=-1) + 1} tiles"
            raise InputError(
                "groups", got=got, expected="one tile for each request", hint="fewer queries, or more rows"
            )
        if self.begin.any():
            got = "a mask that hides first keys"
            raise InputError("groups", got=got, expected="runs that begin at key 0", hint="causal, or no mask")
        begin, count, prefix = self.begin.copy(), self.count.copy(), self.prefix.copy()
        first: list[int] = []
        tiles: list[int] = []
        for group in groups:
            those = np.arange(group.first, group.first + group.requests)
            begin[those] += group.tiles
            count[those] -= group.tiles
            prefix[those] = np.arange(group.requests) // together + len(first)
            first += those[::together].tolist()
            tiles += [group.tiles * block_n // prefix_n] * -(-group.requests // together)
        requests, counts, zeros = np.array(first), np.array(tiles), np.zeros(len(first), dtype=np.int64)
        pieces, _ = programs_of_lines(
            int(counts.sum()) * self.heads, int(count.sum()) * self.heads, prefix_n=prefix_n, block_n=block_n,
            programs=self.programs, own_programs=self.programs, meanwhile=False,
        )  # fmt: skip
        prefixes = WorkList(requests, zeros, zeros, counts, self.heads, pieces, zeros - 1)
        return WorkList(self.request, self.tile, begin, count, self.heads, self.programs, prefix, prefixes)

    @functools.cached_property
    def before(self) -> Array:
        """Where each unit begins in the line, and where that ends: (units + 1,)."""
        before = np.zeros(self.count.size + 1, dtype=np.int64)
        np.cumsum(self.count, out=before[1:])
        before *= self.heads
        return before

    @property
    def work(self) -> int:
        """Tiles of all units and heads."""
        return int(self.before[-1])

    @property
    def starts(self) -> Array:
        """The first position of each program, and the end of the line: (programs + 1,)."""
        busy = min(self.programs, self.work)
        each, more = divmod(self.work, max(busy, 1))
        p: Array = np.minimum(np.arange(self.programs + 1), busy)
        return np.minimum(p, more) + p * each

    def places(self, positions: Array) -> tuple[Array, Array, Array]:
        """(unit, head, tile of the unit's run) of positions in the line; the end of the line is one more unit's."""
        unit = self.before.searchsorted(positions, side="right") - 1
        count = self.count.take(unit, mode="clip") if self.count.size else np.ones_like(unit)
        head, tile = np.divmod(positions - self.before[unit], count)
        return unit, head, tile

    def segments(self, program: int) -> Iterator[Segment]:
        """What one program does, in order."""
        position, stop = (int(x) for x in self.starts[program : program + 2])
        while position < stop:
            unit, head, first = (int(x[0]) for x in self.places(np.array([position])))
            end = min(int(self.count[unit]), first + stop - position)
            yield Segment(unit, head, first, end)
            position += end - first

    def merges(self) -> list[Merge]:
        """The rows of tiles that are cut between programs, or behind a prefix."""
        before = {} if self.prefixes is None else self.prefixes.parts()
        merges = []
        for (unit, head), programs in self.parts().items():
            if len(programs) > 1 or self.prefix[unit] >= 0:
                slots = (2 * programs[0] + 1, *(2 * p for p in programs[1:]))
                merges.append(Merge(unit, head, slots, tuple(before.get((int(self.prefix[unit]), head), ()))))
        return merges

    def parts(self) -> dict[tuple[int, int], list[int]]:
        """The programs that have some of each row of tiles (unit, head), in order."""
        found: dict[tuple[int, int], list[int]] = {}
        for program in range(self.programs):
            for unit, head, _first, _end in self.segments(program):
                found.setdefault((unit, head), []).append(program)
        return found


def _visited(
    mask: Any, request: Array, heads: int, first: Array, last: Array, keys: Array, block_n: int
) -> tuple[Array, Array]:
    """First and end of the key tiles that any of the queries first .. last sees, for any head."""
    bound = as_mask(mask).bound
    rule = tile_rule(bound.text)
    if rule.spans is None:
        return np.zeros_like(keys), -(-keys // block_n)
    low, high = rule.spans["i"][:2]  # that any query sees
    at = {name: torch.as_tensor(x)[None] for name, x in (("b", request), ("i0", first), ("i1", last))}
    at["h"] = torch.arange(heads if rule.by_head else 1)[:, None]
    found = evaluate([low, high], at, bound.tensors, bound.numbers)
    begin, end = (x.expand(at["h"].shape[0], keys.size).numpy() for x in found)
    begin, end = np.maximum(begin, 0), np.minimum(end, keys - 1)
    sees = end >= begin
    begin = np.where(sees, begin // block_n, np.iinfo(np.int64).max).min(0, initial=np.iinfo(np.int64).max)
    end = np.where(sees, end // block_n + 1, 0).max(0, initial=0)
    return np.where(end > 0, begin, 0), end
