"""Where a step of the engine spends its time: a small workload of prompts beside decoding requests, traced."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise.core.errors import InputError
from tilewise.engine import Engine, SamplingParams
from tilewise.explain.engine_tracer import COMPUTE, HOST, Span, TracedStep, Tracer
from tilewise.kv.arguments import check_count

GLYPHS = dict(zip((*HOST, *COMPUTE), "pslwtENPRAMHSo", strict=True))
LANES = ("host", "compute")
_SETTLED = 3  # tokens of each decoding request before tracing begins


def trace(
    engine: Engine, *, decoding: int = 4, context: int = 64, prompt: int = 256, steps: int = 4, seed: int = 0
) -> list[TracedStep]:
    """Steps of an engine in which a prompt arrives beside requests that decode.

    A prompt of the same length has been computed before, so that nothing is compiled while steps are traced.

    Args:
        engine: one without requests; it has none afterwards.
        decoding: requests that decode all the time.
        context: tokens of their prompts.
        prompt: tokens of the prompt that arrives in the first traced step; 0 for none.
        steps: to trace.
        seed: of the prompts' random tokens.

    Returns:
        The steps.

    Raises:
        InputError: a count out of range, an engine in use, or one too small for the workload.
    """
    _check(engine, decoding=decoding, context=context, prompt=prompt, steps=steps)
    generator = torch.Generator().manual_seed(seed)

    def add(length: int, count: int) -> str:
        tokens = torch.randint(engine.decoder.config.vocab_size, (length,), generator=generator).tolist()
        return engine.add(tokens, SamplingParams(temperature=0.7, seed=seed, max_tokens=count, ignore_eos=True))

    names = [add(context, engine.max_model_len - context) for _ in range(decoding)]
    try:
        _advance(engine, dict.fromkeys(names, _SETTLED))
        if prompt:
            _advance(engine, {add(prompt, 2): 2})
            names.append(add(prompt, engine.max_model_len - prompt))
        with Tracer(engine) as tracer:
            for _ in range(steps):
                engine.step()
    finally:
        for name in names:
            engine.abort(name)
        while engine.has_unfinished:
            engine.step()
    return tracer.steps


def _check(engine: Engine, *, decoding: int, context: int, prompt: int, steps: int) -> None:
    for name, value, least in (("decoding", decoding, 0), ("context", context, 1), ("prompt", prompt, 0)):
        check_count(name, value, least)
    check_count("steps", steps, 1)
    if not decoding and not prompt:
        raise InputError("decoding", got="0, and no prompt", expected="a request", hint="there is nothing to trace")
    if engine.has_unfinished:
        raise InputError("engine", got="one in use", expected="one without requests", hint="make another")
    most, running = engine.max_model_len, engine.config.max_running
    if decoding + bool(prompt) > running:
        hint = "fewer requests that decode"
        raise InputError("decoding", got=decoding, expected=f"room in max_running, {running}", hint=hint)
    # both prompts, and what decodes meanwhile
    chunks = -(-prompt // max(1, engine.config.max_batch_tokens - decoding))
    longest = max(context + _SETTLED + 2 * (chunks + _SETTLED), prompt) + steps + 2
    if longest > most:
        hint = "a shorter one, fewer steps, or a larger max_model_len"
        raise InputError("prompt", got=f"{longest} tokens", expected=f"at most max_model_len, {most}", hint=hint)
    if (decoding + bool(prompt)) * longest > engine.pages.tokens:
        expected = f"at most {engine.pages.tokens} tokens, those of all pages"
        raise InputError("decoding", got=decoding, expected=expected, hint="fewer requests, or more pages")


def _advance(engine: Engine, wanted: dict[str, int]) -> None:
    """Until each of these requests has so many tokens."""
    while wanted:
        for output in engine.step():
            if len(output.outputs[0].token_ids) >= wanted.get(output.request_id, engine.max_model_len):
                del wanted[output.request_id]


def summary(steps: Sequence[TracedStep]) -> list[tuple[str, float, float, float]]:
    """(kind, its milliseconds in a step with a prompt, and in one without, share of the time of all steps)."""
    kinds = [kind for kind in (*HOST, *COMPUTE) if any(step.total(kind) for step in steps)]
    mixed = [step for step in steps if step.prompt_tokens]
    others = [step for step in steps if not step.prompt_tokens]
    whole = sum(step.ms for step in steps)
    return [
        (kind, _mean(mixed, kind), _mean(others, kind), sum(s.total(kind) for s in steps) / whole) for kind in kinds
    ]


def _mean(steps: Sequence[TracedStep], kind: str) -> float:
    return sum(step.total(kind) for step in steps) / len(steps) if steps else 0.0


def timeline(steps: Sequence[TracedStep], width: int = 72) -> str:
    """Steps as text: a line for each lane, in which a character is the kind that took most of its time.

    Args:
        steps: as `trace` returns them.
        width: characters of the longest step.

    Returns:
        The lines, with what the characters mean.
    """
    ends = [step.begin for step in steps[1:]] + [max(span.end for step in steps for span in step.spans)]
    cell = max(end - step.begin for step, end in zip(steps, ends, strict=True)) / width
    spans = [span for step in steps for span in step.spans]
    lines = []
    for number, (step, end) in enumerate(zip(steps, ends, strict=True), 1):
        lines.append(f"step {number}: {described(step)}, {step.ms:.2f} ms")
        cells = max(1, round((end - step.begin) / cell))
        for lane in LANES:
            here = [span for span in spans if span.lane == lane and span.end > step.begin and span.begin < end]
            glyphs = (_glyph(here, step.begin + n * cell, step.begin + (n + 1) * cell) for n in range(cells))
            lines.append(f"  {lane:<8}{''.join(glyphs)}")
    lines.append(f"a character is {cell:.3g} ms")
    for lane, kinds in zip(LANES, (HOST, COMPUTE), strict=True):
        seen = [f"{GLYPHS[kind]} {kind}" for kind in kinds if any(span.kind == kind for span in spans)]
        lines.append(f"  {lane:<8}{', '.join(seen)}")
    return "\n".join(lines)


def described(step: TracedStep) -> str:
    """What a step computes, in words."""
    of_prompt = f", {step.prompt_tokens} tokens of prompts" if step.prompt_tokens else ""
    return f"{step.decoding} decode{of_prompt}"


def _glyph(spans: Sequence[Span], begin: float, end: float) -> str:
    """The kind with most time between two moments, a dot where most of it is nobody's."""
    times = dict.fromkeys([span.kind for span in spans], 0.0)
    for span in spans:
        times[span.kind] += max(0.0, min(span.end, end) - max(span.begin, begin))
    best = max(times, key=lambda kind: times[kind], default="")
    return GLYPHS[best] if best and times[best] > 0 and sum(times.values()) > (end - begin) / 2 else "."
