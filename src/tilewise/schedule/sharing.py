"""Which requests share a prefix: neighbours whose block tables begin alike, where that saves more than it costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

PIECE_KEYS = 512  # of a prefix, at least, that a program takes where others could have some
FASTER = 2  # times as many keys as of a prefix that a multiprocessor reads for few rows in the same time


class Group(NamedTuple):
    """Requests `first` to `first + requests - 1`, which share the first `tiles` tiles of keys."""

    first: int
    requests: int
    tiles: int


def common_tiles(
    tables: Sequence[Sequence[int]],
    seqlens: Sequence[int],
    queries: int,
    page_size: int,
    block_n: int,
    prefix_n: int | None = None,
) -> list[int]:
    """How many tiles of keys each request has in common with the one before it, all before the queries of both.

    Args:
        tables: the pages of each request. seqlens: its keys, of which the last `queries` are those of its queries.
        page_size, block_n: tokens of a page, and of a tile.
        prefix_n: of a tile of a prefix, which has whole ones of these.
    """
    together = max((prefix_n or block_n) // block_n, 1)
    found = [0] if tables else []
    for (before, keys_before), (table, keys) in itertools.pairwise(zip(tables, seqlens, strict=True)):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, table, strict=False))
        tokens = min(page_size * sum(1 for _ in same), keys_before - queries, keys - queries)
        found.append(max(tokens, 0) // (block_n * together) * together)
    return found


def groups_of(common: Sequence[int], *, together: int, block_n: int, token_bytes: int, part_bytes: int) -> list[Group]:
    """The groups that are worth it.

    A request goes with the one before it, unless either has more than twice as much in common with its other neighbour.
    A group shares what all its neighbours have in common, if the keys that are not read again are more bytes than the
    parts that are written and read instead (`saves`).

    Args:
        common: as `common_tiles` finds it.
        together: requests whose rows fit a tile, which read a prefix together.
        block_n: tokens of a tile. token_bytes: of the keys and values of one, for all heads.
        part_bytes: of a request's partial results, written and read.
    """
    around = [0, *common, 0]
    threes = zip(around, common, around[2:], strict=False)
    goes = [now > 0 and 2 * now >= max(before, behind) for before, now, behind in threes]
    starts = [r for r, with_before in enumerate(goes) if not with_before]
    groups = []
    for first, end in itertools.pairwise([*starts, len(common)]):
        count = end - first
        if count > 1:
            tiles = min(common[first + 1 : end])
            if saves(count, tiles * block_n, together=together, token_bytes=token_bytes, part_bytes=part_bytes):
                groups.append(Group(first, count, tiles))
    return groups


def saves(requests: int, tokens: int, *, together: int, token_bytes: int, part_bytes: int) -> bool:
    """Whether requests that read a prefix of so many tokens together save bytes: keys and values, for parts that are
    each request's own, one of its prefix, and one more for each piece that this may be cut into.
    """
    saved = (requests - -(-requests // together)) * tokens * token_bytes
    return saved > requests * (2 + tokens // PIECE_KEYS) * part_bytes


def programs_of_lines(
    tiles: int, own: int, *, prefix_n: int, block_n: int, programs: int, own_programs: int, meanwhile: bool
) -> tuple[int, int]:
    """How many programs have some of the prefixes' tiles, a piece each, and how many of requests' own.

    Pieces of fewer than PIECE_KEYS keys would make parts that a merge reads for longer than their keys are waited for.
    A launch over requests that begins `meanwhile` does the fewer keys on multiprocessors that prefixes leave free: so
    many that both launches end together.

    Args:
        tiles, own: of all heads, of prefix_n and of block_n keys.
        programs, own_programs: that there are, of which multiprocessors have one, and one or more.
    """
    few = -(-PIECE_KEYS // prefix_n)
    most = min(programs, -(-tiles // few))
    if not meanwhile or tiles == 0 or own * block_n > tiles * prefix_n:
        return most, own_programs
    each = max(-(-(tiles + -(-own * block_n // (prefix_n * FASTER))) // programs), few)
    needed = -(-tiles // each)
    if needed >= programs:
        return most, own_programs
    return needed, (programs - needed) * (own_programs // programs)
