"""Cases of `tilewise.kv.KVCache`: steps of a server, after which attention reads what was put in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import tilewise as tw
from tilewise.core.errors import OutOfPagesError
from tilewise.kv import KVCache
from tilewise.quant import encode, encode_by_channel
from tools.fuzz import placed as places
from tools.fuzz.case import Case, Tensors
from tools.fuzz.draw import HALVES, PAGE_SIZES, Draw
from tools.fuzz.exact import Rules, attend, numbers_by_channel, numbers_of
from tools.fuzz.formulas import Part, library_masks

DTYPES = (*HALVES, torch.float32)
WORDS = 3  # tokens there are: few, so that sequences come to begin alike
EVERYTHING: tuple[tw.TopPages | tw.SparQ, ...] = (
    tw.TopPages(10**6), tw.TopPages(10**6, far="summary"), tw.SparQ(3, 10**6),
)  # fmt: skip
ORDERS = ("NHD", "HND", None)


@dataclass(frozen=True)
class Step:
    """One call of the cache. `who` are numbers of sequences, in the order of their birth; `counts` how many tokens each
    is extended by, the length that one is cut to, or how many of its tokens are remembered.

    Of an extension `rows` are the tokens of each sequence after it, as rows of keys and values, and `shown` how many of
    the last ones have queries that are compared.
    """

    what: str
    who: tuple[int, ...]
    counts: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    shown: tuple[int, ...] = ()


@dataclass
class Script:
    """Steps as they are drawn. `lossy` sequences have keys that codes have changed: nobody may share them by tokens."""

    draw: Draw
    size: int
    by_channel: bool
    steps: list[Step] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)
    lossy: set[int] = field(default_factory=set)
    codes: dict[int, int] = field(default_factory=dict)  # how many pages of a sequence are full, or were
    known: dict[tuple[int, ...], int] = field(default_factory=dict)  # rows by all tokens up to theirs
    pages: int = 0  # that must exist
    taken: int = 0  # that would, were none ever handed back
    most: int = 0  # sequences that live at a time

    def add(self, what: str, who: Sequence[int], **more: Any) -> None:
        """One more step."""
        self.steps.append(Step(what, tuple(who), **more))

    def new(self) -> None:
        """A prompt, which may begin as an earlier one did, and its computation."""
        draw, begun = self.draw, draw_prefix(self.draw, self.tokens)
        more = draw.one((1, 2, self.size, draw.one((3, 5, 2 * self.size + 1))))
        prompt = begun + tuple(draw.sizes.randrange(WORDS) for _ in range(more))
        number = len(self.tokens)
        self.tokens.append(())
        self.alive.append(number)
        self.add("new", (number,), tokens=prompt)
        self.extend((number,), (prompt,), prompts=True)

    def extend(self, who: Sequence[int], new: Sequence[tuple[int, ...]], prompts: bool = False) -> None:
        """New tokens of some sequences."""
        for number, own in zip(who, new, strict=True):
            before = len(self.tokens[number])
            if own and before % self.size and before // self.size < self.codes.get(number, 0):
                self.lossy |= {number} if self.by_channel else set()
            self.tokens[number] += own
            if own:
                self.codes[number] = len(self.tokens[number]) // self.size
            self.taken += -(-len(own) // self.size) + 2
        rows = tuple(self._rows(self.tokens[number]) for number in who)
        shown = tuple(min(len(own), 1 if prompts else 4) for own in new)
        self.add("extend", who, counts=tuple(map(len, new)), rows=rows, shown=shown)
        held = sum(-(-len(self.tokens[number]) // self.size) for number in self.alive)
        self.pages, self.most = max(self.pages, held), max(self.most, len(self.alive))

    def another(self) -> None:
        """Any step."""
        draw = self.draw
        number = draw.one(self.alive)
        length = len(self.tokens[number])
        what = draw.one(("extend", "extend", "extend", "fork", "fork", "cut", "cut", "free", "new", "remember", "much"))
        if what == "extend":
            who = sorted(self.alive, key=lambda _: draw.sizes.random())[: draw.one((1, 2, 9))]
            counts = [draw.one((1, 1, 0, 2, self.size, draw.one((3, self.size + 2)))) for _ in who]
            self.extend(who, [tuple(draw.sizes.randrange(WORDS) for _ in range(n)) for n in counts])
        elif what == "fork" and len(self.alive) < 6:
            self._fork(number)
        elif what == "cut":
            left = draw.one((0, length // 2, max(0, length - 1), length))
            self.tokens[number] = self.tokens[number][:left]
            self.codes[number] = min(self.codes.get(number, 0), -(-left // self.size))
            self.add("cut", (number,), counts=(left,))
        elif what == "free" and len(self.alive) > 1:
            self.alive.remove(number)
            self.add("free", (number,))
        elif what == "remember" and number not in self.lossy:
            self.add("remember", (number,), counts=(draw.one((length, length // 2)),), tokens=self.tokens[number])
        elif what == "much":
            self.add("much", (number,))
        elif len(self.alive) < 6:
            self.new()

    def _fork(self, number: int) -> None:
        copy = len(self.tokens)
        self.tokens.append(self.tokens[number])
        self.codes[copy] = self.codes.get(number, 0)
        self.lossy |= {copy} if number in self.lossy else set()
        self.alive.append(copy)
        self.most = max(self.most, len(self.alive))
        self.add("fork", (number, copy))

    def _rows(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Keys and values depend on all tokens before: another history has another row."""
        return tuple(self.known.setdefault(tokens[:n], len(self.known)) for n in range(1, len(tokens) + 1))


def draw_prefix(draw: Draw, tokens: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The beginning of a sequence there was, or nothing."""
    if not tokens or draw.chance(0.3):
        return ()
    own = draw.one(tokens)
    return own[: draw.one((len(own), len(own) // 2))]


@dataclass(frozen=True)
class Kind:
    """How keys and values are kept, and what reads them."""

    size: int
    encoding: str | None
    bits: int | None
    order: str | None
    layers: int
    part: Part
    select: tw.TopPages | tw.SparQ | None

    @property
    def text(self) -> str:
        """As a person reads it."""
        codes = f"{self.encoding}{f', keys by channel of {self.bits} bits' if self.bits else ''}"
        return (
            f"{self.layers} layers, pages of {self.size} {self.order}, codes {codes}, {self.part.text}, {self.select}"
        )


def kv_cache(draw: Draw) -> Case:
    """Prompts, forks, cuts and steps of decoding; a cache as large as it must be, or one that forgets nothing."""
    dtype, sizes = draw.kernel(DTYPES), places.heads(draw)
    sizes = replace(sizes, dim=-(-sizes.dim // 4) * 4, dim_v=-(-sizes.dim_v // 4) * 4)
    encoding = draw.kernel((None, None, "int8", "fp8", "int4"))
    bits = draw.kernel((None, 4, 2)) if encoding else None
    everything: tuple[tw.TopPages | tw.SparQ, ...] = (
        tw.TopPages(10**6),
        tw.TopPages(10**6, far="summary"),
        tw.SparQ(3, 10**6),
    )
    select = draw.one(everything) if not encoding and draw.chance(0.4) else None
    size = draw.kernel([n for n in PAGE_SIZES if n <= 32])
    part = draw.kernel([part for part in library_masks(5, 8) if part.text in ("causal", "window(8)")])
    part = library_masks(1, 1)[0] if select else part
    kind = Kind(size, encoding, bits, draw.kernel(ORDERS), draw.one((1, 2)), part, select)
    script = Script(draw, size, bits is not None)
    for _ in range(draw.one((1, 2))):
        script.new()
    for _ in range(draw.one((3, 6, 10))):
        script.another()
    script.extend(script.alive, [(0,)] * len(script.alive))
    rows = len(script.known)
    inputs = {
        name: draw.rows((kind.layers, rows, heads, dim), dtype, draw.kernel(("plain", "padded")))
        for name, heads, dim in (
            ("q", sizes.q, sizes.dim),
            ("k", sizes.kv, sizes.dim),
            ("v", sizes.kv, sizes.dim_v),
        )
    }
    roomy = draw.chance(0.5)
    pages = script.taken + 2 * len(script.tokens) + 8 if roomy else script.pages + script.most
    longest = max(1, *(len(own) for step in script.steps for own in step.rows))
    names = [f"{step.what} {' '.join(map(str, step.who))}" for step in script.steps]
    return Case(
        f"{dtype} {sizes.text} {kind.text}, {pages} of them{' for all' if roomy else ''}: {', '.join(names)}",
        dtype,
        inputs,
        lambda x: _served(x, script, kind, sizes, dtype, pages, roomy),
        lambda x: _by_hand(x, script, kind, sizes, dtype, roomy),
        terms=longest * sizes.group,
        exact=("positions", "known", "least", "largest"),
    )


def _served(
    x: Tensors, script: Script, kind: Kind, sizes: places.Heads, dtype: torch.dtype, pages: int, roomy: bool
) -> Tensors:
    cache = KVCache(
        kind.layers, pages, kind.size, sizes.kv, sizes.dim, sizes.dim_v, dtype=dtype, device=x["q"].device,
        order=kind.order, encoding=kind.encoding, keys_by_channel=kind.bits,
        open_pages=script.most if kind.bits else None, summaries=kind.select is not None,
        columns=8 if isinstance(kind.select, tw.SparQ) else None,
    )  # fmt: skip
    live: dict[int, Any] = {}
    found = _Found()
    for step in script.steps:
        first = step.who[0] if step.who else -1
        if step.what == "new":
            live[first] = cache.new(step.tokens)
            found.known += [live[first].length] * roomy
        elif step.what == "extend":
            _extend(x, cache, kind, step, [live[number] for number in step.who], found)
        elif step.what == "fork":
            (live[step.who[1]],) = cache.fork(live[first])
        elif step.what == "cut":
            cache.truncate(live[first], step.counts[0])
        elif step.what == "free":
            cache.free(live.pop(first))
        elif step.what == "remember":
            found.known.append(cache.remember(live[first], step.tokens[: step.counts[0]]))
        else:
            _too_much(cache, live[first], pages * kind.size + 1)
        assert not cache.allocator.violations(), cache.allocator.violations()
    summaries = cache.pool.summaries(0)
    if summaries is not None:
        used = [page for number in script.alive for page in live[number].pages]
        found.of_pages = {name: x[used] for name, x in summaries.tensors.items() if name != "columns"}
    return found.results(x["q"], sizes)


def _extend(x: Tensors, cache: KVCache, kind: Kind, step: Step, sequences: list[Any], found: _Found) -> None:
    """The step of a model: write in all layers, then read in all."""
    counts = [len(rows) - sequence.length for rows, sequence in zip(step.rows, sequences, strict=True)]
    batch = cache.extend(sequences, counts)
    new = [row for rows, count in zip(step.rows, counts, strict=True) for row in rows[len(rows) - count :]]
    ends = torch.tensor(counts).cumsum(0).tolist()
    shown = [n for end, some in zip(ends, step.shown, strict=True) for n in range(end - some, end)]
    for layer in range(kind.layers):
        batch.write(layer, x["k"][layer][new], x["v"][layer][new])
    for layer in range(kind.layers):
        given: dict[str, Any] = {"layout": batch.layout, "mask": kind.part.mask({})}
        if kind.select is not None:
            given |= {"layout": batch.layout_of(layer), "select": kind.select}
        o, lse = tw.attention_with_lse(x["q"][layer][new], *cache.pages(layer), **given)
        found.add(o[shown], lse[:, shown])
    found.positions += batch.positions[shown].tolist()


def _too_much(cache: KVCache, sequence: Any, count: int) -> None:
    """What cannot be had changes nothing."""
    before = (sequence.length, list(sequence.pages), cache.allocator.num_free, cache.allocator.num_cached)
    try:
        cache.extend([sequence], count)
    except OutOfPagesError:
        after = (sequence.length, list(sequence.pages), cache.allocator.num_free, cache.allocator.num_cached)
        assert before == after, f"a step that failed has changed {before} to {after}"
    else:
        raise AssertionError(f"{count} more tokens than there are slots were taken")


@dataclass
class _Found:
    """Results of all steps."""

    o: list[torch.Tensor] = field(default_factory=list)
    lse: list[torch.Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    of_pages: Tensors = field(default_factory=dict)

    def add(self, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Of one call."""
        self.o.append(o)
        self.lse.append(lse)

    def results(self, like: torch.Tensor, sizes: places.Heads) -> Tensors:
        """One after another."""
        nothing = like.new_zeros(0, sizes.q, sizes.dim_v)
        o, lse = torch.cat([nothing, *self.o]), torch.cat([nothing[..., 0].T.to(self.lse[0].dtype), *self.lse], 1)
        counted = {"positions": torch.tensor(self.positions), "known": torch.tensor(self.known)}
        return {"o": o, "lse": lse, **counted, **self.of_pages}


@dataclass
class _Kept:
    """What a sequence's tokens are, (layers, tokens, heads, dim), of whose pages the first `closed` are codes."""

    k: torch.Tensor
    v: torch.Tensor
    closed: int = 0


def _by_hand(x: Tensors, script: Script, kind: Kind, sizes: places.Heads, dtype: torch.dtype, roomy: bool) -> Tensors:
    """The same without pages: every sequence has its own keys and values."""
    values = x["v"] if kind.encoding is None else _decoded(x["v"], kind.encoding)
    keys = x["k"] if kind.encoding is None or kind.bits else _decoded(x["k"], kind.encoding)
    live: dict[int, _Kept] = {}
    remembered: set[tuple[int, ...]] = set()
    found = _Found()
    for step in script.steps:
        first = step.who[0] if step.who else -1
        if step.what == "new":
            live[first] = _Kept(keys[:, :0], values[:, :0])
            most = (len(step.tokens) - 1) // kind.size
            full = [step.tokens[: n * kind.size] for n in range(1, most + 1)]
            found.known += [kind.size * sum(prefix in remembered for prefix in full)] * roomy
        elif step.what == "extend":
            for number, rows, shown in zip(step.who, step.rows, step.shown, strict=True):
                found.positions += range(len(rows) - shown, len(rows))
                live[number] = _extended(live[number], keys, values, rows, kind, dtype)
            for layer in range(kind.layers):
                found.add(*_attended(x, step, kind, sizes, layer, live))
        elif step.what == "fork":
            live[step.who[1]] = live[first]
        elif step.what == "cut":
            own, left = live[first], step.counts[0]
            live[first] = _Kept(own.k[:, :left], own.v[:, :left], min(own.closed, -(-left // kind.size)))
        elif step.what == "remember":
            full = [step.tokens[: n * kind.size] for n in range(1, step.counts[0] // kind.size + 1)]
            remembered |= set(full)
            found.known.append(kind.size * len(full))
    if kind.select is not None:
        k, v = ([part for n in script.alive for part in getattr(live[n], side)[0].split(kind.size)] for side in "kv")
        ends = {"least": [x.amin(0) for x in k], "largest": [x.amax(0) for x in k]}
        ends |= {"k_mean": [x.mean(0) for x in k], "v_mean": [x.mean(0) for x in v]}
        found.of_pages = {name: torch.stack(parts) for name, parts in ends.items()}
    return found.results(x["q"], sizes)


def _attended(
    x: Tensors, step: Step, kind: Kind, sizes: places.Heads, layer: int, live: dict[int, _Kept]
) -> tuple[torch.Tensor, torch.Tensor]:
    rules, parts = Rules(sizes.dim**-0.5, kind.part.visible), []
    for b, (number, rows, shown) in enumerate(zip(step.who, step.rows, step.shown, strict=True)):
        own, q = live[number], x["q"][layer][list(rows[len(rows) - shown :])]
        parts.append(attend(q, own.k[layer], own.v[layer], rules, b, x))
    return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], 1)


def _extended(
    own: _Kept, keys: torch.Tensor, values: torch.Tensor, rows: tuple[int, ...], kind: Kind, dtype: torch.dtype
) -> _Kept:
    """With more tokens; a page of keys by channel is opened where these go on inside it, and closed when it is full."""
    size, there = kind.size, own.k.shape[1]
    new = list(rows[there:])
    k, v = own.k, torch.cat([own.v, values[:, new]], 1)
    if not new or kind.bits is None:
        return _Kept(torch.cat([k, keys[:, new]], 1), v)
    closed = min(own.closed, there // size)
    begun = k[:, closed * size :]
    k = torch.cat([k[:, : closed * size], begun.to(dtype).to(k.dtype), keys[:, new]], 1)
    for page in range(closed, k.shape[1] // size):
        part = slice(page * size, (page + 1) * size)
        code = encode_by_channel(k[:, part].to(dtype), kind.bits)
        scale, least = (part.double() for part in (code.scale, code.least))
        k[:, part] = numbers_by_channel(code.data, scale, least, code.open, code.place).float().to(k.dtype)
    return _Kept(k, v, k.shape[1] // size)


def _decoded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """What codes of rows stand for."""
    code = encode(x.float(), kind)
    return numbers_of(code.data, code.scale.to(x.dtype if x.dtype == torch.float64 else torch.float32)).to(x.dtype)
