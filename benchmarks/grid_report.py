"""How the report shows `exact_forward` and `exact_backward`: the names and order of their rows, and a plot of lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.records import Record

QUESTIONS = ("exact_forward", "exact_backward")
Row = tuple[str, dict[str, Record]]


def label(problem: dict[str, Any]) -> str:
    """A row's name: head dimension, heads, full or causal, sequences and their length."""
    heads, shared = problem["num_heads_q"], problem["num_heads_kv"]
    rows = f"{problem['batch']} × {problem['seqlen_q']:,} tokens" if "seqlen_q" in problem else ""
    words = [
        f"D {problem['head_dim']}",
        f"{heads} heads" if heads == shared else f"{heads} heads on {shared}",
        "causal" if problem["causal"] else "full",
        rows or f"{problem['batch']} documents packed, {problem['total']:,} tokens",
    ]
    return ", ".join(words)


def place(problem: dict[str, Any]) -> tuple[Any, ...]:
    """Where a row stands: the grid by head dimension, full before causal, by length; then grouped, then packed."""
    grouped = problem["num_heads_q"] != problem["num_heads_kv"]
    return "total" in problem, grouped, problem["head_dim"], problem["causal"], problem.get("seqlen_q", 0)


def plot(device: str, question: str, rows: list[Row], folder: Path) -> Path | None:
    """TFLOP/s over the length, a panel for each head dimension, full and causal; None where the grid has no rate."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    panels: dict[tuple[bool, int], dict[str, list[tuple[int, float]]]] = {}
    for _, row in rows:
        for impl, record in row.items():
            packed, grouped, head_dim, causal, seqlen = place(record.problem)
            if record.tflops and not packed and not grouped:
                panels.setdefault((causal, head_dim), {}).setdefault(impl, []).append((seqlen, record.tflops))
    if not panels:
        return None
    impls = sorted(
        {impl for lines in panels.values() for impl in lines}, key=lambda impl: (not impl.startswith("tilewise"), impl)
    )
    across, down = sorted({head_dim for _, head_dim in panels}), sorted({causal for causal, _ in panels})
    ceilings = [record.ceiling_tflops for _, row in rows for record in row.values() if record.ceiling_tflops]
    settings = {"svg.hashsalt": question, "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure, grid = plt.subplots(
            len(down), len(across), figsize=(1.2 + 2.8 * len(across), 0.9 + 2.3 * len(down)), sharey=True,
            squeeze=False, layout="constrained",
        )  # fmt: skip
        for (causal, head_dim), lines in panels.items():
            axes = grid[down.index(causal)][across.index(head_dim)]
            for index, impl in enumerate(impls):
                if impl in lines:
                    places, rates = zip(*lines[impl], strict=True)
                    axes.plot(places, rates, marker="o", markersize=3.5, color=f"C{index}", label=impl)
            if ceilings:
                axes.axhline(min(ceilings), color="0.6", linestyle="--", linewidth=0.8, label="matrix product")
            lengths = sorted({seqlen for points in lines.values() for seqlen, _ in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{seqlen:,}" for seqlen in lengths])
            axes.set_xticks([], minor=True)
            axes.set_ylim(bottom=0)
            axes.set_title(f"D {head_dim}, {'causal' if causal else 'full'}", loc="left", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
        handles = {
            name: line for axes in grid.flat for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), frameon=False, ncols=len(handles), loc="outside lower center")
        for axes in grid[-1]:
            axes.set_xlabel("sequence length")
        for axes in grid[:, 0]:
            axes.set_ylabel("TFLOP/s, visible pairs")
        figure.suptitle(f"{question.replace('_', ' ')} on {device}", fontsize=10)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{device}-{question}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return path
