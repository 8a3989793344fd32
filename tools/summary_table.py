"""The README's numbers: the lowest and the highest speedup of each table of docs/performance.md."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.grid_report import place
from benchmarks.records import RESULTS, Record
from benchmarks.report import Table, outdated
from tools import serving_table, speed_table
from tools.speed_table import EXACT, FUSED, PASSES, QUANTIZED, SPARSE

SCHEME = "sage2"
QUESTIONS = (*EXACT, *PASSES, *QUANTIZED, *SPARSE, "decode", *FUSED)
Line = tuple[str, str, Iterable[float | None], Iterable[float | None]]


def table(results: Path = RESULTS) -> str:
    """One line a kind of workload: against whom, and the range of speedups, forward and backward."""
    tables = speed_table.of_one_device(results, QUESTIONS)
    lines = ["| workload | against | forward | backward |", "|---" * 4 + "|"]
    for what, against, forward, backward in _lines(tables):
        shown = _range(forward)
        if shown:
            lines.append(f"| {what} | {against} | {shown} | {_range(backward)} |")
    records = [record for rows in tables.values() for _, row in rows for record in row.values()]
    if not records:
        return "No records yet."
    return "\n".join(lines) + "\n\n" + _caption(records)


def headline(results: Path = RESULTS) -> str:
    """The README's third bullet: the ranges of exact attention, of formulas, and of `Sage2` where it loses and wins."""
    tables = speed_table.of_one_device(results, QUESTIONS)
    found = [(what, _range(forward), _range(backward)) for what, _, forward, backward in _lines(tables)]
    dense = next(((f, b) for what, f, b in found if what.startswith("exact")), None)
    formulas = next(((f, b) for what, f, b in found if what.startswith("masks")), None)
    coded = [(what.rpartition(", ")[2], f) for what, f, _ in found if "Sage2" in what]
    if not (dense and formulas and coded):
        return "* **Speed**: no records yet."
    (short, loss), (long, gain) = coded[0], coded[-1]
    quoted = (*EXACT, *PASSES, *QUANTIZED)
    when = speed_table.dates(r for question in quoted for _, row in tables[question] for r in row.values())
    when = re.sub(r"^(\d+-\d+-)(\d+) to \1", r"\1\2 to -", when)  # a month that both days are in, once
    text = (
        f"* **Fast on Hopper**, measured {when}: {dense[0]} the fastest of cuDNN, FlashAttention-2 and -4 (backward "
        f"{dense[1]}), {formulas[0]} compiled FlexAttention, `Sage2()` {gain} exact attention at {long}, {loss} at "
        f"{short.removesuffix(' tokens')}."
    )
    return textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _lines(tables: dict[str, Table]) -> Iterator[Line]:
    grid = [(size, speed) for size, speed in speed_table.exact_ratios(tables) if not any(place(size)[:2])]
    if grid:
        dims, lengths = (sorted({size[key] for size, _ in grid}) for key in ("head_dim", "seqlen_q"))
        ends = ("–".join(f"{n:,}" for n in dict.fromkeys((found[0], found[-1]))) for found in (dims, lengths))
        what = "exact attention, head_dim {}, {} tokens".format(*ends)
        peers = "fastest of cuDNN, FlashAttention-2 and -4"
        yield what, peers, *([speed[n] for _, speed in grid] for n in (0, 1))
    passes = [[row for _, row in tables[question]] for question in PASSES]
    if passes[0]:
        length = next(iter(passes[0][0].values())).problem["seqlen_q"]
        flex = ([speed_table.over(row, "flex") for row in rows] for rows in passes)
        yield f"masks and scores as formulas, {length:,} tokens", "FlexAttention, compiled", *flex
    found = [(size, included) for name, size, included, _ in speed_table.quantized_ratios(tables) if name == SCHEME]
    lengths = sorted({size["seqlen_q"] for size, _ in found})
    for length in dict.fromkeys((*lengths[:1], *lengths[-1:])):
        speed = [included for size, included in found if size["seqlen_q"] == length]
        yield f"`quantize=tw.Sage2()`, quantisation included, {length:,} tokens", "exact attention", speed, ()
    sparse = list(speed_table.sparse_rows(tables))
    for kind, what in (("`sliding_tile", "`mask=tw.sliding_tile(...)`"), ("`Sparge", "`select=tw.Sparge(...)`")):
        rows = [row for row in sparse if row[0].startswith(kind)]
        names = " and ".join(dict.fromkeys(row[4] for row in rows))
        shares = f"{what}, {_shares([row[1] for row in rows])}"
        yield shares, f"{names}, all pairs", [speed_table.times(row[5], row[2]) for row in rows], ()
    for what, lengths in (("equal and uniform", ("equal", "uniform")), ("Zipf", ("zipf",))):
        rates = serving_table.rates(tables, "flashinfer", lengths)
        yield f"paged decode, {what} lengths, planning included", "FlashInfer, planned before", rates, ()
    equal = serving_table.rates(tables, "cudnn.contiguous", ("equal",))
    yield "paged decode, equal lengths, planning included", "cuDNN, contiguous keys", equal, ()
    fused = [row for _, row in speed_table.first_shapes(tables)]
    yield (
        "fused norms, softmax, RoPE, SwiGLU, losses", "faster of eager and `torch.compile`",
        *([speed_table.over(row[n], speed_table.pytorch(row[n])) for row in fused] for n in (0, 1)),
    )  # fmt: skip


def _range(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return f"{low}×" if low == high else f"{low}–{high}×"


def _shares(texts: list[str]) -> str:
    """ "9.4% of the pairs" and "41.9% of the pairs" as "9.4–41.9% of the pairs"."""
    found = sorted((float(text.partition("%")[0]), text) for text in texts)
    if not found:
        return ""
    low, high = found[0][1], found[-1][1]
    return high if low == high else f"{low.partition('%')[0]}–{high}"


def _caption(records: list[Record]) -> str:
    caption = f"{speed_table.made(records)}."
    return caption + (" Kernels have changed since: re-measurement pending." if outdated(records) else "")
