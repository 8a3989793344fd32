"""What `tune-sparse` and `tune-windows` share: a file that an interrupted run resumes from, layers named in errors."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tilewise import selections
from tilewise.cli import dumps
from tilewise.cli.output import check_writable, machine, say, say_json, table
from tilewise.cli.timing import quantiles, repeat
from tilewise.core.errors import InputError, TilewiseError

Out = Annotated[
    Path, typer.Option(help="File of results, written after each layer; if it exists, the run resumes from it.")
]
Seconds = Annotated[float, typer.Option(help="Time to spend on timing each layer on a GPU, about.", min=0.01)]
Clock = Callable[[Callable[[], object]], float | None]  # milliseconds of a call on a GPU; None on a CPU
Look = Callable[[dumps.Tensors, Clock], dict[str, Any]]


class Document:
    """The file of `tilewise.selections`, as it grows.

    Raises:
        InputError: the file is there, and other settings made it; or it cannot be written.
    """

    def __init__(self, out: Path, settings: dict[str, Any], where: torch.device, seconds: float) -> None:
        self.out, self._where, self._seconds = out, where, seconds
        self._began = time.perf_counter()
        if out.is_dir():
            raise InputError("--out", got=f"{out}, a folder", expected="a file", hint="name a file in it")
        check_writable("--out", out.parent)
        settings = json.loads(json.dumps(settings))  # as the file gives them back
        self.held: dict[str, Any] = {"format": selections.FORMAT, "settings": settings, "layers": []}
        if not out.exists():
            return
        held = selections.read(out)
        if held["settings"] != settings:
            told = [name for name in settings if held["settings"].get(name) != settings[name]]
            raise InputError(
                "--out", got=f"{out}, made with other settings ({', '.join(told) or 'of another kind'})",
                expected="a file that the same settings made, or none", hint="name another file, or remove this one",
            )  # fmt: skip
        self.held = held

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The layers' entries."""
        found: list[dict[str, Any]] = self.held["layers"]
        return found

    def look_at(self, given: list[dumps.Layer], look: Look) -> None:
        """Add what `look` finds in each layer; layers that the file has already are skipped."""
        for layer in given:
            source = "demo" if layer.path is None else _digest(layer.path)
            if any((kept["name"], kept["source"]) == (layer.name, source) for kept in self.layers):
                continue
            started = time.perf_counter()
            entry = {"name": layer.name, "source": source, **self.named(layer, look)}
            entry["seconds"] = round(time.perf_counter() - started, 3)
            self.held["layers"] = [kept for kept in self.layers if kept["name"] != layer.name] + [entry]
            self.write()

    def named(self, layer: dumps.Layer, look: Look) -> dict[str, Any]:
        """What `look` finds in a layer; errors name the layer."""
        try:
            return look(layer.load(), self._clock)
        except TilewiseError as error:
            name = f"{layer.name}: {error.name}"
            raise InputError(name, got=error.got, expected=error.expected, hint=error.hint) from error

    def _clock(self, call: Callable[[], object]) -> float | None:
        # a CPU runs other kernels with a selection than without: their times would not be of the same work
        timed = self._where.type == "cuda"
        return quantiles(repeat(call, self._where, self._seconds))[1] if timed else None

    def write(self) -> None:
        """Replace the file at once, so that an interrupted run leaves a whole one."""
        beside = self.out.with_name(self.out.name + ".new")
        beside.write_text(json.dumps(self.held, indent=1), encoding="utf-8")
        os.replace(beside, self.out)

    def show(self, as_json: bool) -> None:
        """Print what was found: `found` of each layer has density and lost by head; errors, ms and ms_of_all too, if
        its file was given to this run.
        """
        spent = time.perf_counter() - self._began
        if as_json:
            say_json({"device": machine(self._where), "torch": torch.__version__, "seconds": spent, **self.held})
            return
        timed = self._where.type == "cuda"
        columns = ("layer", "heads", "computed", "least", "most", "weight lost", "error, worst head",
                   *(("ms", "ms, all tiles") if timed else ()))  # fmt: skip
        rows = []
        for layer in self.layers:
            found = layer["found"]
            density: list[float] = found["density"]
            measured: tuple[str, ...] = ("", "", "") if timed else ("",)
            if "errors" in found:
                worst = max(range(len(density)), key=found["errors"].__getitem__)
                times = (f"{found[name]:.3f}" for name in (("ms", "ms_of_all") if timed else ()))
                measured = (f"{found['errors'][worst]:.4f} ({worst})", *times)
            rows.append(
                (
                    layer["name"],
                    str(len(density)),
                    *(f"{100 * x:.1f} %" for x in (sum(density) / len(density), min(density), max(density))),
                    f"{100 * sum(found['lost']) / len(density):.2f} %",
                    *measured,
                )
            )
        table("Share of the tiles that is computed, by head: mean, least and most", columns, rows)
        say(f"{self.out}: {len(rows)} layer{'s' * (len(rows) != 1)}, {spent:.1f} s; tilewise.load_selections reads it")


def _digest(path: Path) -> str:
    if not path.is_file():
        return ""  # loading it raises
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while part := file.read(1 << 24):
            digest.update(part)
    return digest.hexdigest()[:16]
