"""A picture of an engine's steps: what the host does, and what the model computes meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.core.errors import InputError
from tilewise.explain.draw import style
from tilewise.explain.engine_steps import LANES, described
from tilewise.explain.engine_tracer import COMPUTE, HOST, ROTATION, TracedStep

MOST = 16  # steps that a picture has room for
_COLOURS = {
    "plan": style.INK,
    "send": style.SERIES[4],
    "launch": style.MUTED,
    "wait": style.EMPTY,
    "take": style.SERIES[0],
    "embedding": "#8c6d46",
    "norm": style.PARTIAL_PALE,
    "projections": style.FULL,
    ROTATION: style.SERIES[3],
    "attention": style.SERIES[1],
    "MLP": style.PARTIAL,
    "head": "#5fb3ce",
    "sampling": "#b05aa0",
    "other": style.HAIRLINE,
}


def engine_steps(steps: Sequence[TracedStep]) -> Any:
    """A figure with a panel for each step and a line for each lane, in milliseconds since the step began.

    Args:
        steps: as `explain.engine_steps.trace` returns them, at most 16.

    Returns:
        A matplotlib figure, for `draw.save`.

    Raises:
        InputError: no steps, or more than the picture has room for.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> from tilewise.engine import Engine, EngineConfig
        >>> from tilewise.engine.models.load import decoder_of
        >>> from tilewise.explain import draw, engine_steps
        >>> decoder = decoder_of("random:tiny", device="cpu")
        >>> engine = Engine(decoder, config=EngineConfig(max_model_len=64, num_pages=64))
        >>> figure = draw.engine_steps(engine_steps.trace(engine, context=8, prompt=16, steps=2))
    """
    if not 0 < len(steps) <= MOST:
        raise InputError("steps", got=len(steps), expected=f"from 1 to {MOST}", hint="trace fewer steps")
    with style.look():
        size = (7.5, 0.95 * len(steps) + 1.0)
        figure, axes = style.canvas(rows=len(steps), size=size, sharex=True, squeeze=False)
        for number, (step, ax) in enumerate(zip(steps, axes[:, 0], strict=True), 1):
            for kind, colour in _COLOURS.items():
                spans = [(s.begin - step.begin, s.end - s.begin) for s in step.spans if s.kind == kind]
                lane = LANES.index("host" if kind in HOST else "compute")
                ax.broken_barh(spans, (lane - 0.4, 0.8), color=colour, linewidth=0)
            ax.set_title(f"step {number}: {described(step)}, {step.ms:.2f} ms", fontsize=9)
            ax.set_yticks(range(len(LANES)), LANES)
            ax.tick_params(axis="y", length=0)
            ax.spines[["left"]].set_visible(False)
            ax.set_ylim(len(LANES) - 0.5, -0.5)
        axes[-1, 0].set_xlabel("milliseconds since the step began")
        seen = [kind for kind in (*HOST, *COMPUTE) if any(step.total(kind) for step in steps)]
        handles = [style.matplotlib().patches.Patch(color=_COLOURS[kind], label=kind) for kind in seen]
        figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False, fontsize=8)
    return figure
