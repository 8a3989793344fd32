"""Generate benchmarks/REPORT.md and its plots from the records: `python -m benchmarks.report [--check]`.

For each device, question and problem the newest run that measured it is shown, contenders side by side, so that every
comparison is within one run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import engine_report, grid_report, serving_report
from benchmarks.environment import ROOT
from benchmarks.records import RESULTS, Record, read_all
from tools.same_code import of_today

REPORT = ROOT / "benchmarks" / "REPORT.md"
PLOTS = ROOT / "benchmarks" / "plots"
# Problem keys that make a row's label, in this order; the other keys go into the caption where all rows share them.
LABEL = ("operation", "shape", "formula", "workload", "decoding", "caches", "before", "change", "on", "seqlen_q")
HEAD = """# Benchmark report

Generated from `benchmarks/results/` by `python -m benchmarks.report`; do not edit. Every row compares contenders within
one run. **Bold** is the fastest of its row. "x peer" is the best peer's time over the best tilewise time: above 1,
tilewise is faster.

Contenders: `cudnn` and `fa2` are the cuDNN and FlashAttention-2 back ends of PyTorch's `scaled_dot_product_attention`,
`flex` is FlexAttention under `torch.compile`, `torch_varlen` is `torch.nn.attention.varlen` (FlashAttention-2), `fa4`
is FlashAttention-4 (package `flash-attn-4`), `flashinfer` is FlashInfer (package `flashinfer-python`), `quack` is QuACK
(package `quack-kernels`), `sage1` is SageAttention 1.0 (package `sageattention`). Contenders with `.kernel` are given
codes. `eager` and `compile` are PyTorch's operators without and with `torch.compile`, `eager.cudnn`
and `compile.cudnn` with attention by cuDNN; `tilewise.eager` and `tilewise.compile` are ours. Of engines,
`transformers.continuous` is the continuous batching of transformers, `transformers.generate` its `generate`. TFLOP/s
count visible pairs: 4 · head_dim operations per pair in the forward pass, 2.5 times that in the backward pass;
percentages are shares of the same run's matrix product. "Not applicable" stands where a row of ours does not take the
call.
"""

Table = list[tuple[str, dict[str, Record]]]
LABELS: dict[str, Callable[[dict[str, Any]], str]] = {
    question: shape.label for shape in (engine_report, grid_report, serving_report) for question in shape.QUESTIONS
}


def latest(records: Iterable[tuple[str, Record]]) -> dict[tuple[str, str], Table]:
    """(device, question) to rows (label, impl to record), each row from the newest run that has its problem."""
    runs: dict[tuple[str, str], dict[str, dict[str, list[Record]]]] = {}
    for device, record in records:
        by_problem = runs.setdefault((device, record.question), {})
        by_problem.setdefault(_problem_key(record.problem), {}).setdefault(record.run, []).append(record)
    tables: dict[tuple[str, str], Table] = {}
    for key, by_problem in runs.items():
        chosen = [max(by_run.values(), key=lambda rows: rows[0].date) for by_run in by_problem.values()]
        if key[1] in grid_report.QUESTIONS:
            chosen.sort(key=lambda rows: grid_report.place(rows[0].problem))
        label = LABELS.get(key[1], _label)
        tables[key] = [(label(rows[0].problem), {row.impl: row for row in rows}) for rows in chosen]
    return tables


def _problem_key(problem: dict[str, Any]) -> str:
    return repr(sorted(problem.items(), key=lambda item: item[0]))


def _label(problem: dict[str, Any]) -> str:
    words = [f"{problem[key]:,} tokens" if key == "seqlen_q" else str(problem[key]) for key in LABEL if key in problem]
    return ", ".join(words).replace("|", "\\|") or "all"


def ratio(row: dict[str, Record]) -> float | None:
    """Best peer's median time over the best tilewise median time; None where one side has no time, or some time is not
    steady.
    """
    times = {impl: record.p50_ms for impl, record in row.items() if record.p50_ms is not None}
    ours = [time for impl, time in times.items() if impl.startswith("tilewise")]
    peers = [time for impl, time in times.items() if not impl.startswith("tilewise")]
    known = ours and peers and min(ours) > 0 and all(record.steady for record in row.values())
    return min(peers) / min(ours) if known else None


def _cell(record: Record | None, best: float | None, share: bool, speedup: float | None = None) -> str:
    if record is None:
        return ""
    if record.failed and record.error is not None:
        if record.error["metric"] != "failure":
            return str(record.error["metric"])
        return f"fails: {str(record.error['message'])[:60]}".replace("|", "/")
    parts = []
    if record.p50_ms is not None:
        time = _time(record.p50_ms)
        parts.append(f"**{time}**" if record.p50_ms == best else time)
    if record.p99_ms is not None:
        parts.append(f"99 % {_time(record.p99_ms)}")
    if record.tokens_per_s is not None:
        parts.append(f"{record.tokens_per_s:,.0f} tokens/s")
    if speedup is not None:
        parts.append(f"{speedup:.2f} x")
    if record.tflops is not None:
        parts.append(f"{record.tflops:.0f} TFLOP/s" if record.tflops >= 10 else f"{record.tflops:.3g} TFLOP/s")
        if share and record.ceiling_tflops:
            parts[-1] += f" ({100 * record.tflops / record.ceiling_tflops:.0f} %)"
    if record.gbps is not None:
        parts.append(f"{record.gbps:,.0f} GB/s" if record.gbps >= 10 else f"{record.gbps:.3g} GB/s")
    if record.peak_mib is not None:
        parts.append(f"+{record.peak_mib:,.0f} MiB" if record.peak_mib >= 10 else f"+{record.peak_mib:.1f} MiB")
    if record.count is not None:
        parts.append(f"{record.count:,}")
    if record.percent is not None:
        parts.append(f"{record.percent:.3g} %")
    return ", ".join(parts)


def _time(ms: float) -> str:
    value, unit = (ms / 1000, "s") if ms >= 1000 else (ms, "ms") if ms >= 1 else (ms * 1000, "µs")
    return f"{value:#.3g}".removesuffix(".") + f" {unit}"


def table(question: str, rows: Table) -> str:
    """One Markdown table with its caption and the errors of our contenders."""
    impls = sorted({impl for _, row in rows for impl in row}, key=lambda impl: (not impl.startswith("tilewise"), impl))
    compared = any(ratio(row) is not None for _, row in rows)
    head = ["", *impls, *(["x peer"] if compared else [])]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for label, row in rows:
        times = [record.p50_ms for record in row.values() if record.p50_ms is not None]
        share = question in grid_report.QUESTIONS
        best = min(times, default=None)
        cells = [_cell(row.get(impl), best, share, serving_report.speedup(question, impl, row)) for impl in impls]
        if compared:
            value = ratio(row)
            cells.append("" if value is None else f"{value:.2f}")
        lines.append("| " + " | ".join([label, *cells]) + " |")
    return "\n".join(lines) + "\n\n" + _caption(question, rows)


def _caption(question: str, rows: Table) -> str:
    records = [record for _, row in rows for record in row.values()]
    shared = {
        key: value
        for key, value in records[0].problem.items()
        if key not in LABEL and all(record.problem.get(key) == value for record in records)
    }
    sentences = [f"Problem: {', '.join(f'{key} {value}' for key, value in shared.items())}." if shared else ""]
    if question in serving_report.BASELINES:
        sentences.append(f"x: the time of {serving_report.BASELINES[question][0]}, over this one.")
    what = "Time includes" if any(record.p50_ms is not None for record in records) else "What is counted"
    sentences.append(f"{what}: {'; '.join(_unique(record.includes for record in records))}.")
    ceilings = [record.ceiling_tflops for record in records if record.ceiling_tflops is not None]
    if ceilings:
        sentences.append(f"Matrix-product ceiling of the same runs: {min(ceilings):.3g}–{max(ceilings):.3g} TFLOP/s.")
    unsteady = [f"{impl} ({label})" for label, row in rows for impl, record in row.items() if not record.steady]
    if unsteady:
        sentences.append(f"Medians of half as much again as the fastest fifth, not compared: {', '.join(unsteady)}.")
    errors = [
        (float(record.error["value"]), record.impl, str(record.error["metric"]))
        for record in records
        if record.error is not None and not record.failed
    ]
    for ours in (True, False):
        side = [entry for entry in errors if entry[1].startswith("tilewise") == ours]
        if side:
            value, impl, metric = max(side)
            sentences.append(f"Largest error of {'ours' if ours else 'peers'}: {value:.1e} ({impl}; {metric}).")
    made = _unique(
        f"`{record.command}`, {record.date[:10]}, commit `{record.commit[:7]}`, {record.device}, "
        f"{f'driver {record.driver}, ' if record.driver else ''}torch {record.torch}, triton {record.triton}"
        for record in records
    )
    if outdated(records):
        sentences.append("These records were made with other instructions than today's.")
    sentences.append(f"Method: {'; '.join(_unique(record.method for record in records))}. Made by {'; '.join(made)}.")
    return "\n".join(sentence for sentence in sentences if sentence) + "\n"


def outdated(records: Iterable[Record]) -> bool:
    """Whether some were made with other code of ours than today's."""
    found = {record.sources for record in records if record.sources is not None}
    return not all(map(of_today, found))


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def plot(device: str, question: str, rows: Table, folder: Path) -> Path | None:
    """TFLOP/s per row and contender as SVG, bars or for a grid lines; None where nothing has a rate."""
    if question in grid_report.QUESTIONS:
        return grid_report.plot(device, question, rows, folder)
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    impls = sorted({impl for _, row in rows for impl in row}, key=lambda impl: (not impl.startswith("tilewise"), impl))
    if not any(record.tflops for _, row in rows for record in row.values()):
        return None
    settings = {"svg.hashsalt": question, "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        across = max(1.6 + 1.5 * len(rows), 7.0)  # inches, of which a name takes 0.6 and 0.07 a letter
        beside = max(1, min(len(impls), int(across / (0.6 + 0.07 * max(map(len, impls))))))
        lines = -(-len(impls) // beside)
        figure, axes = plt.subplots(figsize=(across, 3.4 + 0.2 * lines), layout="constrained")
        axes.set_prop_cycle(color=plt.get_cmap("tab20" if len(impls) > 10 else "tab10").colors)
        width = 0.8 / len(impls)
        for index, impl in enumerate(impls):
            places = [place + (index - (len(impls) - 1) / 2) * width for place in range(len(rows))]
            heights = [(row[impl].tflops or 0.0) if impl in row else 0.0 for _, row in rows]
            axes.bar(places, heights, width * 0.95, label=impl)
        axes.set_xticks(range(len(rows)), ["\n".join(label.split(", ")[:3]) for label, _ in rows])
        axes.set_ylabel("TFLOP/s, visible pairs")
        axes.set_title(f"{question.replace('_', ' ')} on {device}", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(frameon=False, ncols=beside, loc="outside lower center", fontsize=8)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{device}-{question}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return path


def generate(results: Path, plots: Path) -> str:
    """The report's text; writes the plots into `plots`."""
    parts = [HEAD]
    tables = latest(read_all(results))
    if not tables:
        parts.append("No records yet.\n")
    device_before = ""
    for (device, question), rows in sorted(tables.items()):
        if device != device_before:
            parts.append(f"## {device}\n")
            device_before = device
        parts.append(f"### {question.replace('_', ' ')}\n")
        parts.append(table(question, rows))
        path = plot(device, question, rows, plots)
        if path is not None:
            parts.append(f"![{question.replace('_', ' ')} on {device}](plots/{path.name})\n")
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Write the report; with --check write nothing and exit with 1 where it is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where the committed report differs")
    if parser.parse_args(argv).check:
        with tempfile.TemporaryDirectory() as folder:
            text = generate(RESULTS, Path(folder))
            stale = [path.name for path in Path(folder).iterdir() if _bytes(PLOTS / path.name) != path.read_bytes()]
        if _bytes(REPORT) != text.encode():
            stale.append(REPORT.name)
        if stale:
            print(f"not up to date: {', '.join(stale)}; run python -m benchmarks.report", file=sys.stderr)
        return 1 if stale else 0
    REPORT.write_text(generate(RESULTS, PLOTS), encoding="utf-8")
    print(f"wrote {REPORT.relative_to(ROOT)}")
    return 0


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
