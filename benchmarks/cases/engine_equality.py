"""Question `engine_equality`: tokens of the engine are those of transformers' generate, and of each request alone.

Part `greedy`: 64 prompts of up to 96 tokens, 128 tokens each; one and all requests at a time, steps of 16 to 8,192
tokens, pages of 1, 16 and 64, prefix cache on and off, no request or one in each step losing its pages: 96 lines. Part
`sampled`: temperatures of 0.5, 1 and 1.5, all processors together, each alone and none; one, 8 and all requests at a
time, in two orders, the same steps and preemption: 48 lines.

On a CPU, in float32, all tokens must be equal. On a GPU fewer lines run, in which each two values meet: 13 and 14.
There, in bfloat16, `tilewise.deterministic` must give each request what it gives it alone; `tilewise` must give what
transformers does, up to a near tie: where the first token differs, the two largest logits must be within 2**-6 of the
larger one. Of its sampled answers those that differ are counted.

`--model` names a checkpoint's folder, smollm2 (the default) or random:NAME. `--resume FILE` keeps the outcome of each
line, so that the case may be cut short at any time; a record is written when all lines of a part are there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import Options
from benchmarks.engines import equality
from benchmarks.engines.equality import CHUNKS, PAGES, Asked, Difference, Line, Tokens
from benchmarks.engines.peers import transformers_model
from benchmarks.environment import current, version
from benchmarks.records import Writer
from benchmarks.timing import failure_message
from tilewise.core.errors import UnsupportedError
from tilewise.engine.models.decoder import Decoder
from tilewise.engine.models.load import decoder_of
from tools.families import FAMILIES

QUESTION = "engine_equality"
REQUESTS, COUNT = 64, 128
QUICK = 3, 6
STRIDE = 19  # of lines, in a quick run
ALONE = Line("alone", 1, 8192, 16, False, False)
RULES = {
    "equal": "answers that differ",
    "near": "answers that differ elsewhere than at a near tie",
    "counted": "answers that differ, where they may",
}


class Kept:
    """A file of outcomes by name, from which a run that was cut short goes on; of another run it starts anew."""

    def __init__(self, path: Path | None, run: dict[str, Any]) -> None:
        self.path, self._found = path, dict[str, Any]()
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        if lines and json.loads(lines[0]) == run:
            whole = [line for line in lines[1:] if line.endswith("}")]  # the last one may be cut short
            self._found = {name: value for line in whole for name, value in json.loads(line).items()}
            self._write([json.dumps(run), *whole])
        else:
            self._write([json.dumps(run)])

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """What was found before, or is now."""
        if name not in self._found:
            self._found[name] = made = make()
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({name: made}) + "\n")
        return self._found[name]

    def _write(self, lines: Sequence[str]) -> None:
        if self.path is not None:
            self.path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


@dataclass(frozen=True)
class Setting:
    """A model of ours and of transformers, and what both are asked."""

    decoder: Decoder
    peer: Any
    prompts: list[Tokens]
    count: int
    kept: Kept

    def want(self, impl: str, asked: Sequence[Asked], part: str, rule: str) -> list[Tokens]:
        """What answers are held to: those of transformers, or those of our engine, each request alone."""
        if part == "greedy" and (rule == "near" or self.decoder.device.type == "cpu"):
            return [
                self.kept.get(f"transformers {n}", lambda tokens=tokens: self._of_transformers(tokens))  # type: ignore[misc]
                for n, tokens in enumerate(self.prompts)
            ]
        fixed = impl.endswith(".deterministic")
        alone: list[Tokens] = self.kept.get(
            f"{impl}: {part}, alone",
            lambda: equality.answers(self.decoder, ALONE, asked, deterministic=fixed),
        )
        return alone

    def _of_transformers(self, tokens: Tokens) -> Tokens:
        return next(equality.of_transformers(self.peer, [tokens], self.count))

    def differences(self, impl: str, line: Line, asked: Sequence[Asked], want: list[Tokens], rule: str) -> list[Any]:
        """Of one line."""

        def nearly(request: int, position: int) -> bool:
            return equality.near_tie(self.peer, self.prompts[request] + want[request][:position])

        def make() -> list[dict[str, Any]]:
            found = equality.answers(self.decoder, line, asked, deterministic=impl.endswith(".deterministic"))
            return [asdict(each) for each in equality.compared(found, want, nearly if rule == "near" else None)]

        listed = self.kept.get(f"{impl}: {line.name}", make)
        return [Difference(**each) for each in listed]


def run(options: Options) -> None:
    """Go through the lines of the parts that are wanted."""
    device, model = options.device, options.model or ("random:tiny" if options.quick else "smollm2")
    dtype = "bfloat16" if device == "cuda" else "float32"
    requests, count = QUICK if options.quick else (REQUESTS, COUNT)
    environment = current(device)
    decoder = decoder_of(model, dtype=dtype, device=device)
    said = {"commit": environment.commit, "sources": FAMILIES["engine"].hash(), "device": environment.device}
    said |= {"torch": environment.torch, "model": Path(model).name}
    kept = Kept(options.resume, {**said, "requests": requests, "count": count})
    peer = transformers_model(model, decoder.dtype, device)
    setting = Setting(decoder, peer, equality.prompts(requests, decoder.config.vocab_size), count, kept)
    method = f"transformers {version('transformers')}, one request at a time"
    writer = Writer(environment, method=method, ceilings=(None, None), results=options.out)
    for part in ("greedy", "sampled"):
        if options.wants(part):
            stride = STRIDE if options.quick else 1
            for impl, rule in rules(part, device).items():
                measure(setting, Path(model).name, part, impl, rule, writer, stride=stride)


def rules(part: str, device: str) -> dict[str, str]:
    """By which rule who is judged."""
    if device == "cpu":
        return {"tilewise": "equal"}
    return {"tilewise.deterministic": "equal", "tilewise": "near" if part == "greedy" else "counted"}


def measure(
    setting: Setting, model: str, part: str, impl: str, rule: str, writer: Writer, *, stride: int = 1
) -> list[Difference]:
    """One record for all lines of a part; returns what differs."""
    requests, vocab = len(setting.prompts), setting.decoder.config.vocab_size
    made = equality.greedy_lines(requests) if part == "greedy" else equality.sampled_lines(requests)
    lines = list(made)[::stride]
    if setting.decoder.device.type == "cuda":
        lines = equality.covering(lines)
    problem = {
        "model": model, "workload": f"{part}, {requests} prompts × {setting.count} tokens", "lines": len(lines),
        "batches": sorted({line.batch for line in lines}), "chunks": list(CHUNKS), "page_sizes": list(PAGES),
        "dtype": str(setting.decoder.dtype).removeprefix("torch."),
    }  # fmt: skip
    told: dict[str, Any] = {"includes": "answers of all lines; percent: those that are equal, token for token"}
    told["sources"] = FAMILIES["engine"].hash()
    asked = equality.greedy(setting.prompts, setting.count)
    if part == "sampled":
        asked = equality.sampled(setting.prompts, setting.count, vocab)
    differences: list[Difference] = []
    try:
        want = setting.want(impl, asked, part, rule)
        for line in lines:
            found = setting.differences(impl, line, asked, want, rule)
            print(f"{impl}: {line.name}: {requests - len(found)} of {requests} equal", flush=True)
            differences += found
    except UnsupportedError as error:
        told["error"] = {"metric": "not applicable", "message": failure_message(error)}
        writer.write(QUESTION, problem, impl, **told)
        return []
    answers = requests * len(lines)
    wrong = sum(not each.near_tie for each in differences)
    told["error"] = {"metric": RULES[rule], "value": wrong}
    told["percent"] = 100 * (1 - len(differences) / answers)
    writer.write(QUESTION, problem, impl, count=answers, **told)
    return differences
