"""`tilewise generate`, `tilewise chat` and `tilewise convert`: text from a model."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli.output import FAILED, console, guarded, say, say_json

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or smollm2: fetched on first use.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="The smallest set of tokens with this probability stays.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens of an answer at most.")]
Seed = Annotated[int | None, typer.Option(help="The same prompt, options and seed give the same text.")]
MaxModelLen = Annotated[int, typer.Option(help="Tokens of the whole conversation at most.")]
Speculative = Annotated[str | None, typer.Option(help="How tokens are proposed: ngram, suffix, lookahead.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]


@guarded
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    n: Annotated[int, typer.Option(help="Answers.")] = 1,
    max_model_len: MaxModelLen = 2048,
    dtype: Dtype = "auto",
    speculative: Speculative = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Continue a text.

    Example: tilewise generate smollm2 "The capital of France is" --max-tokens 16
    """
    llm, params_of = _llm(model, max_model_len, dtype, speculative)
    params = params_of(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, n=n)
    (output,) = llm.generate([prompt], params)
    if as_json:
        answers = [{"text": each.text, "tokens": each.token_ids, "why": each.finish_reason} for each in output.outputs]
        say_json({"prompt": prompt, "answers": answers})
    else:
        for each in output.outputs:
            say(f"{prompt}{each.text}")
    for wrong in {each.error for each in output.outputs} - {None}:
        console(stderr=True).print(f"tilewise: {wrong}")
        raise typer.Exit(FAILED)


@guarded
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = None,
    max_model_len: MaxModelLen = 4096,
    dtype: Dtype = "auto",
    speculative: Speculative = None,
) -> None:
    """Talk to a model. Ctrl-C stops an answer; an empty line, or Ctrl-D, ends the program.

    Example: tilewise chat smollm2
    """
    llm, params_of = _llm(model, max_model_len, dtype, speculative)
    params = params_of(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    say(llm.why())
    say("Ctrl-C stops an answer; an empty line ends.\n")
    while True:
        asked = _ask()
        if not asked:
            return
        messages.append({"role": "user", "content": asked})
        text = _answer(llm, messages, params)
        messages.append({"role": "assistant", "content": text})


@guarded
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="A GGUF file of a Llama model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, in Hugging Face's format.")],
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, float16 or bfloat16.")] = "bfloat16",
) -> None:
    """Convert a GGUF file to a folder that `tilewise chat` and transformers read.

    Example: tilewise convert SmolLM2-135M-Instruct.Q4_1.gguf path/to/folder
    """
    from tilewise.engine.gguf import convert as convert_file

    convert_file(file, out, dtype)
    say(f"wrote {out}")


def _ask() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _answer(llm: Any, messages: list[dict[str, str]], params: Any) -> str:
    """Show an answer as it comes; returns its text, as far as it got."""
    from tilewise.engine.interrupts import Interrupts

    engine, shown, tokens, error, start = llm.engine, "", 0, None, time.perf_counter()
    name = secrets.token_hex(8)
    try:
        engine.add(llm.tokenizer.encode_chat(messages), params, request_id=name)
        while engine.has_unfinished:
            for output in engine.step():
                answer = output.outputs[0]
                sys.stdout.write(answer.text[len(shown) :])
                sys.stdout.flush()
                shown, tokens, error = answer.text, len(answer.token_ids), answer.error
    except KeyboardInterrupt:
        with Interrupts():
            engine.abort(name)
            engine.step()
    if error is not None:
        say(f"\n[{error}]")
    seconds = max(time.perf_counter() - start, 1e-9)
    say(f"\n[{tokens} tokens, {tokens / seconds:.1f} tokens/s]")
    return shown


def _llm(model: str, max_model_len: int, dtype: str, speculative: str | None) -> tuple[Any, Any]:
    """(the model, the class of its parameters), after what is missing was fetched."""
    from tilewise.engine import LLM, SamplingParams
    from tilewise.engine.smollm2 import folder

    where: str | Path = folder(_Progress()) if model == "smollm2" else model
    return LLM(where, max_model_len=max_model_len, dtype=dtype, speculative=speculative), SamplingParams


class _Progress:
    """One line on stderr for each stage of what is fetched."""

    def __init__(self) -> None:
        self._line = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        line = f"{stage}: {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB"
        if line != self._line and sys.stderr.isatty():
            sys.stderr.write(f"\r{line}" + ("\n" if done >= total else ""))
            sys.stderr.flush()
        self._line = line
