"""What a run of the demo found, as data, as JSON and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewise.demo.options import Options

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Curves:
    """Training losses in nats a token, one value a step, by the name of the attention."""

    losses: dict[str, tuple[float, ...]]

    @property
    def max_difference(self) -> float | None:
        """Largest |difference| between the two curves over all steps (nan if a loss is not finite); None without a second curve."""
        if len(self.losses) < 2:
            return None
        differences = [abs(a - b) for a, b in zip(*self.losses.values(), strict=True)]
        return math.nan if any(math.isnan(d) for d in differences) else max(differences)

    @property
    def step_of_max(self) -> int | None:
        """The step (from 0) of the largest difference."""
        if len(self.losses) < 2:
            return None
        differences = [abs(a - b) for a, b in zip(*self.losses.values(), strict=True)]
        return differences.index(max(differences))

    def first(self, name: str = "tilewise") -> float:
        """Loss before the first update."""
        return self.losses[name][0]

    def last(self, name: str = "tilewise") -> float:
        """Mean loss of the last twentieth of the steps (single steps are noisy)."""
        tail = self.losses[name][-max(1, len(self.losses[name]) // 20) :]
        return sum(tail) / len(tail)

    def sparkline(self, name: str = "tilewise", width: int = 60) -> str:
        """The curve as one line of block characters, each the mean of its share of the steps."""
        losses = self.losses[name]
        width = min(width, len(losses))
        edges = [round(n * len(losses) / width) for n in range(width + 1)]
        means = [sum(losses[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
        low, high = min(means), max(means)
        if not math.isfinite(low + high):
            return ""
        span = (high - low) or 1.0
        return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


@dataclass(frozen=True)
class Result:
    """A finished run. Losses in nats a token, times in seconds unless the name says otherwise."""

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
    prompt: str
    generated: str
    new_tokens: int
    seconds: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether all losses are finite and the two curves stay within the tolerance."""
        finite = all(math.isfinite(loss) for losses in self.curves.losses.values() for loss in losses)
        difference = self.curves.max_difference
        return finite and (difference is None or difference <= self.tolerance)

    @property
    def bits_per_byte(self) -> float:
        """Held-out loss as bits a byte of text, which does not depend on the tokenizer."""
        return self.held_out_loss / math.log(2) / self.held_out_bytes_per_token

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready data."""
        chosen = self.options
        return {
            "passed": self.passed,
            "max_difference": self.curves.max_difference,
            "step_of_max_difference": self.curves.step_of_max,
            "tolerance": self.tolerance,
            "loss_first": self.curves.first(),
            "loss_last": self.curves.last(),
            "held_out_loss": self.held_out_loss,
            "held_out_bits_per_byte": self.bits_per_byte,
            "losses": {name: list(losses) for name, losses in self.curves.losses.items()},
            "step_ms": self.step_ms,
            "seconds": self.seconds,
            "device": self.device,
            "dtype": chosen.dtype,
            "implementation": self.implementation,
            "size": chosen.size,
            "steps": chosen.steps,
            "batch": chosen.batch,
            "seqlen": chosen.seqlen,
            "seed": chosen.seed,
            "parameters": self.parameters,
            "text": self.text,
            "text_bytes": self.text_bytes,
            "train_tokens": self.train_tokens,
            "vocab_size": self.vocab_size,
            "prompt": self.prompt,
            "generated": self.generated,
            "new_tokens": self.new_tokens,
        }

    def summary(self) -> str:
        """The findings as plain text, without the generated code."""
        curves = self.curves
        lines = [f"loss {curves.first():.3f} -> {curves.last():.3f}   {curves.sparkline()}"]
        lines.append(f"held-out files: {self.held_out_loss:.3f} nats a token, {self.bits_per_byte:.2f} bits a byte")
        lines.append("time a step: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in self.step_ms.items()))
        if curves.max_difference is not None:
            verdict = "the curves agree" if self.passed else "THE CURVES DISAGREE"
            lines.append(
                f"largest difference between the two loss curves: {curves.max_difference:.2e} at step {curves.step_of_max} "
                f"(tolerance {self.tolerance:g}): {verdict}"
            )
        seconds = self.seconds
        lines.append(
            f"{seconds['total']:.0f} s in all: {seconds['prepare']:.0f} s text and tokenizer, {seconds['train']:.0f} s training, "
            f"{seconds['generate']:.0f} s held-out loss and generation"
        )
        return "\n".join(lines)
