"""What a run of the demo found, as data, as JSON and as text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilewise.demo.memory import Kept
from tilewise.demo.options import Options

OURS, TORCH = "tilewise", "torch"
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Curves:
    """Training losses in nats per token, one value per step, by the name of the learner; a curve may stop early."""

    losses: dict[str, tuple[float, ...]]

    def differences(self) -> dict[str, tuple[float, int]]:
        """For each curve but PyTorch's: the largest |difference| from it (nan if a loss is nan), and its step."""
        found: dict[str, tuple[float, int]] = {}
        for name, losses in self.losses.items():
            if name != TORCH and TORCH in self.losses:
                gaps = [abs(a - b) for a, b in zip(losses, self.losses[TORCH], strict=False)]
                step = max(range(len(gaps)), key=lambda n: math.inf if math.isnan(gaps[n]) else gaps[n])
                found[name] = (gaps[step], step)
        return found

    @property
    def max_difference(self) -> float | None:
        """The largest of all differences, nats; None when nothing is compared."""
        gaps = [gap for gap, _ in self.differences().values()]
        if not gaps:
            return None
        return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)

    @property
    def finite(self) -> bool:
        """Whether every loss is a finite number."""
        return all(math.isfinite(loss) for losses in self.losses.values() for loss in losses)

    def first(self, name: str = OURS) -> float:
        """Loss before the first update."""
        return self.losses[name][0]

    def last(self, name: str = OURS) -> float:
        """Mean loss of the last twentieth of the steps (single steps are noisy)."""
        tail = self.losses[name][-max(1, len(self.losses[name]) // 20) :]
        return sum(tail) / len(tail)

    def sparkline(self, name: str = OURS, width: int = 60) -> str:
        """The curve as one line of block characters, each the mean of its share of the steps."""
        losses = self.losses[name]
        width = min(width, len(losses))
        edges = [round(n * len(losses) / width) for n in range(width + 1)]
        means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
        low, high = min(means), max(means)
        if not math.isfinite(low + high):
            return ""
        span = (high - low) or 1.0
        return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


@dataclass(frozen=True)
class Result:
    """A finished run. Losses in nats per token, times in seconds unless the name says otherwise.

    `memory` is what attention keeps for its backward pass (empty without a comparison); `in_turns` says whether the
    models took their steps one after another, so that their times can be compared.
    """

    options: Options
    device: str
    implementation: str
    parameters: int
    text: str
    text_bytes: int
    train_tokens: int
    vocab_size: int
    curves: Curves
    tolerance: float
    step_ms: dict[str, float]
    held_out_loss: float
    held_out_bytes_per_token: float
    generated: str
    new_tokens: int
    seconds: dict[str, float]
    memory: tuple[Kept, ...] = ()
    in_turns: bool = False

    @property
    def passed(self) -> bool:
        """Whether all losses are finite and no curve differs from PyTorch's by more than the tolerance."""
        difference = self.curves.max_difference
        return self.curves.finite and (difference is None or difference <= self.tolerance)

    @property
    def bits_per_byte(self) -> float:
        """Held-out loss in bits per byte of text, which does not depend on the tokenizer."""
        return self.held_out_loss / math.log(2) / self.held_out_bytes_per_token

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready data."""
        chosen = self.options
        compared = {
            name: {"max_difference": gap, "step": step, "steps": len(self.curves.losses[name])}
            for name, (gap, step) in self.curves.differences().items()
        }
        return {
            "passed": self.passed,
            "max_difference": self.curves.max_difference,
            "tolerance": self.tolerance,
            "compared_with_torch": compared,
            "loss_first": self.curves.first(),
            "loss_last": self.curves.last(),
            "held_out_loss": self.held_out_loss,
            "held_out_bits_per_byte": self.bits_per_byte,
            "losses": {name: list(losses) for name, losses in self.curves.losses.items()},
            "step_ms": self.step_ms,
            "steps_in_turns": self.in_turns,
            "attention_memory": [asdict(kept) for kept in self.memory],
            "seconds": self.seconds,
            "device": self.device,
            "implementation": self.implementation,
            **{name: getattr(chosen, name) for name in ("dtype", "size", "steps", "batch", "seqlen", "seed", "prompt")},
            "parameters": self.parameters,
            "text": self.text,
            "text_bytes": self.text_bytes,
            "train_tokens": self.train_tokens,
            "vocab_size": self.vocab_size,
            "generated": self.generated,
            "new_tokens": self.new_tokens,
        }

    def training(self) -> list[tuple[str, str, str]]:
        """Rows of (what, tilewise, PyTorch) about the training: both columns are of the same work."""
        curves, both = self.curves, TORCH in self.curves.losses
        names = (OURS, TORCH) if both else (OURS,)

        def row(what: str, values: Iterable[str]) -> tuple[str, str, str]:
            ours, *theirs = values
            return what, ours, theirs[0] if theirs else ""

        found = [
            row("loss, nats per token", (f"{curves.first(name):.3f} → {curves.last(name):.3f}" for name in names)),
            row(f"loss over {len(curves.losses[OURS])} steps", (curves.sparkline(name, 20) for name in names)),
        ]
        for name, (gap, _) in curves.differences().items():
            what = f"{name.removeprefix(OURS).strip()}, {len(curves.losses[name])} steps"
            found.append(("largest difference" if name == OURS else what, f"{gap:.1e}", ""))
        if self.in_turns and both:
            found.append(row("median step", (f"{self.step_ms[name]:.1f} ms" for name in names)))
        return found

    def kept(self) -> list[tuple[str, ...]]:
        """Rows of (mask, tilewise, SDPA, scores in memory): what attention keeps for its backward pass, in MB."""
        return [
            (kept.mask, *(f"{kept.bytes[way] / 1e6:.1f} MB" for way in ("tilewise", "sdpa", "scores")))
            for kept in self.memory
        ]

    def notes(self) -> list[str]:
        """The verdict on the curves, what was measured of the memory, the held-out loss and the times, a line each."""
        curves, seconds, lines = self.curves, self.seconds, []
        if curves.max_difference is not None:
            verdict = "the curves agree" if self.passed else "THE CURVES DISAGREE"
            lines.append(
                f"{verdict}: largest difference {curves.max_difference:.1e} nats, tolerance {self.tolerance:g}"
            )
        if self.memory:
            apart = max(kept.difference for kept in self.memory)
            lines.append(
                f"memory is measured, beside q, k and v; the outputs of the three differ by at most {apart:.0e}"
            )
        lines.append(f"held-out files: {self.held_out_loss:.3f} nats per token, {self.bits_per_byte:.2f} bits per byte")
        lines.append(
            f"{seconds['total']:.0f} s in all: text and tokenizer {seconds['prepare']:.0f}, "
            f"training {seconds['train']:.0f}, held-out loss, generation and memory {seconds['generate']:.0f}"
        )
        return lines

    def tables(self) -> list[tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]]:
        """(title, columns, rows) of each table that there is something for."""
        found: list[tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]] = [
            ("Training: same weights, same batches", ("", OURS, "PyTorch" if TORCH in self.curves.losses else ""),
             self.training())
        ]  # fmt: skip
        if self.memory:
            title = f"Attention: memory kept for the backward pass, {self.memory[0].seqlen:,} tokens"
            found.append((title, ("mask", OURS, "PyTorch SDPA", "scores in memory"), self.kept()))
        return found

    def summary(self) -> str:
        """The findings as plain text, without the generated code."""
        lines: list[str] = []
        for title, columns, rows in self.tables():
            widths = [max(len(row[n]) for row in (columns, *rows)) for n in range(len(columns))]
            cells = ([f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)] for row in (columns, *rows))
            lines += [title, *("  ".join(row).rstrip() for row in cells)]
        return "\n".join([*lines, *self.notes()])
