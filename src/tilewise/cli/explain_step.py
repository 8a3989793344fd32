"""`tilewise explain step`: where a step of the generation engine spends its time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli import shapes
from tilewise.cli.output import guarded, machine, say, say_json, table


@guarded
def step(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint's folder; smollm2; or random weights: random:tiny, random:smollm2-135m, "
            "random:qwen3-0.6b, random:llama-3-8b.",
        ),
    ],
    decoding: Annotated[int, typer.Option(min=0, help="Requests that decode.")] = 4,
    context: Annotated[int, typer.Option(min=1, help="Tokens of their prompts.")] = 64,
    prompt: Annotated[int, typer.Option(min=0, help="Tokens of the prompt that arrives in the first step.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Steps to trace.")] = 4,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a step computes at most.")] = 8192,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and of random weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: shapes.Device = None,
    out: Annotated[Path | None, typer.Option("--out", help="Draw into this .svg or .png file.")] = None,
    as_json: shapes.Json = False,
) -> None:
    """Show what the host and the model do in each step of the engine: a prompt arrives beside requests that decode.

    On a GPU the model's parts are measured by CUDA events, which include waits for launches.

    Example: tilewise explain step random:tiny --max-batch-tokens 160 --out steps.svg
    """
    if out is not None:
        from tilewise.explain import draw

        draw.check_target(out)
    from tilewise.engine import Engine, EngineConfig
    from tilewise.engine.groups import groups_of
    from tilewise.engine.models.load import decoder_of
    from tilewise.explain import engine_steps

    where = shapes.device(device)
    decoder = decoder_of(model, dtype=dtype, device=where, seed=seed)
    longest = max(context, prompt) + 1024
    length = min(decoder.config.max_length, longest)
    # pages for all of them: a step that takes pages away is not what is asked for
    num_pages = (decoding + 2) * -(-length // EngineConfig.page_size) * len(groups_of(decoder.config.windows))
    config = EngineConfig(
        max_model_len=length,
        num_pages=num_pages,
        max_batch_tokens=max_batch_tokens,
        max_running=decoding + 2,
        graphs=False,  # whose parts nobody sees
    )
    found = engine_steps.trace(
        Engine(decoder, config=config), decoding=decoding, context=context, prompt=prompt, steps=steps, seed=seed
    )
    if out is not None:
        draw.save(draw.engine_steps(found), out)
    name, kind = Path(model).name, str(decoder.dtype).removeprefix("torch.")
    summary = engine_steps.summary(found)
    if as_json:
        listed = [
            {
                "ms": each.ms, "decoding": each.decoding, "prompt_tokens": each.prompt_tokens,
                "spans": [
                    {"lane": s.lane, "kind": s.kind, "begin_ms": s.begin - each.begin, "end_ms": s.end - each.begin}
                    for s in each.spans
                ],
            }
            for each in found
        ]  # fmt: skip
        shares = {row[0]: {"prompt_ms": row[1], "decoding_ms": row[2], "share": row[3]} for row in summary}
        say_json({"model": name, "dtype": kind, "device": machine(where), "steps": listed, "kinds": shares})
        return
    say(f"{name}, {kind}, {machine(where)}")
    say(engine_steps.timeline(found))
    columns = ("", "with a prompt, ms", "decoding alone, ms", "share of the time")
    table("a step on average", columns, [(k, f"{a:.3f}", f"{b:.3f}", f"{share:.1%}") for k, a, b, share in summary])
    if out is not None:
        say(f"drawn: {out}")
