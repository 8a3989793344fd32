"""`tilewise explain decode`: what is proposed and verified in each step of an answer."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tilewise.cli import shapes
from tilewise.cli.output import guarded, say, say_json
from tilewise.core.errors import InputError, shown


@guarded
def decode(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder; smollm2; or random weights: random:tiny.")
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text; numbers of tokens for random weights.")],
    method: Annotated[str, typer.Option(help="ngram, suffix, lookahead or draft; several joined by +.")] = "ngram",
    draft: Annotated[str | None, typer.Option(help="The smaller model of the method draft.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Proposed tokens of a step at most.")] = 15,
    steps: Annotated[int, typer.Option(min=1, help="Steps to show, from the first that has something to verify.")] = 4,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
    max_model_len: Annotated[int, typer.Option(min=2, help="Tokens of prompt and answer at most.")] = 1024,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: shapes.Device = None,
    as_json: shapes.Json = False,
) -> None:
    """Show the tree of proposed tokens of each step: positions, estimated chances, what was accepted and what came.

    Example: tilewise explain decode random:tiny "5 6 7 5 6 7 5 6" --method ngram
    """
    from tilewise.engine import LLM, SamplingParams, Speculation
    from tilewise.explain import decode_steps

    llm = LLM(
        model, dtype=dtype, device=shapes.device(device), max_model_len=max_model_len,
        speculative=Speculation(method, draft=draft, nodes=nodes, learned=False),
    )  # fmt: skip
    tokenizer = llm.engine.tokenizer
    tokens = _numbers(prompt) if tokenizer is None else tokenizer.encode(prompt)
    most = max(1, llm.engine.max_model_len - len(tokens))
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=most)
    found = decode_steps.trace(llm.engine, tokens, params=params, steps=steps)

    def text(token: int) -> str:
        return str(token) if tokenizer is None else repr(tokenizer.decode([token]))

    if as_json:
        listed: list[dict[str, Any]] = [
            {
                "position": each.position, "tokens": each.tree.tokens, "parents": each.tree.parents,
                "values": each.tree.values, "accepted": each.path, "emitted": each.emitted,
            }
            for each in found
        ]  # fmt: skip
        say_json({"model": model, "method": method, "steps": listed})
        return
    for number, each in enumerate(found, 1):
        count = len(each.tree.tokens) - 1
        say(f"step {number}: {count} proposed, {len(each.path)} accepted, {len(each.emitted)} tokens")
        for line in each.lines(text):
            say(line)
        say(f"   gave {' '.join(map(text, each.emitted))}")
    if not found:
        say("nothing was proposed before the answer ended")


def _numbers(prompt: str) -> list[int]:
    try:
        return [int(word) for word in prompt.split()]
    except ValueError:
        hint = '"5 6 7 5 6"'
        raise InputError("PROMPT", got=shown(prompt), expected="numbers: this model has no text", hint=hint) from None
