"""`tilewise demo`: the whole library at its main job, on real text, on any machine."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli import shapes
from tilewise.cli.output import FAILED, console, guarded, say, say_json
from tilewise.demo import SIZES, Options, run
from tilewise.demo.options import PROMPT
from tilewise.demo.view import Live, Plain

DATA, LEARNING, TEXT = "Text to learn from", "Training", "Generation"

SizeName = Enum("SizeName", {name: name for name in SIZES}, type=str)  # type: ignore[misc]


class Precision(str, Enum):
    """Types the demo can compute in."""

    fp32 = "fp32"
    bf16 = "bf16"


@guarded
def demo(
    size: Annotated[
        SizeName | None,
        typer.Option(help="Model and training length. Default: small, on a GPU medium.", rich_help_panel=LEARNING),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.", rich_help_panel=LEARNING)] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step.", rich_help_panel=LEARNING)] = None,
    seqlen: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence.", rich_help_panel=LEARNING)] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Your own UTF-8 file or directory instead of the standard library; may be repeated.",
            rich_help_panel=DATA,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and sampling.", rich_help_panel=LEARNING)] = 0,
    prompt: Annotated[str, typer.Option(help="What the generated text starts with.", rich_help_panel=TEXT)] = PROMPT,
    new_tokens: Annotated[int, typer.Option(min=0, help="Most tokens to generate.", rich_help_panel=TEXT)] = 160,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token.", rich_help_panel=TEXT)
    ] = Options.temperature,
    compare: Annotated[
        bool,
        typer.Option("--compare/--no-compare", help="Train through PyTorch's operators too.", rich_help_panel=LEARNING),
    ] = True,
    dtype: Annotated[
        Precision | None, typer.Option(help="Default: fp32, on a GPU bf16 (autocast).", rich_help_panel=shapes.MACHINE)
    ] = None,
    device: shapes.Device = None,
    impl: shapes.Impl = None,
    as_json: shapes.Json = False,
) -> None:
    """Train a small Llama on Python's standard library through tilewise.attention, then let it write code.

    A second model, equal at the start, learns from the same batches through PyTorch's own attention; the two loss
    curves must agree (within 0.002 nats in fp32, 0.1 in bf16), or the exit code is 1.

    Example: tilewise demo --prompt "def parse(" --text ~/src/project
    """
    out = console(stderr=as_json)
    options = Options(
        size=None if size is None else str(size.value),
        steps=steps,
        batch=batch,
        seqlen=seqlen,
        text=tuple(text or ()),
        device=device,
        dtype=None if dtype is None else dtype.value,
        seed=seed,
        prompt=prompt,
        new_tokens=new_tokens,
        temperature=temperature,
        impl=impl,
        compare=compare,
    )
    result = run(options, Live(out) if out.is_terminal else Plain(out))
    if as_json:
        say_json(result.as_dict())
    else:
        _show(result.summary(), result.options.prompt, result.generated)
    if not result.passed:
        raise typer.Exit(FAILED)


def _show(summary: str, prompt: str, generated: str) -> None:
    say("\n" + summary)
    out = console()
    if out.is_terminal:
        from rich.console import Console
        from rich.panel import Panel
        from rich.syntax import Syntax

        Console().print(
            Panel(Syntax(prompt + generated, "python"), title="generated", subtitle="the prompt comes first")
        )
    else:
        say(f"\ngenerated (the prompt comes first):\n{prompt}{generated}")
