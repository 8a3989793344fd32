"""Processes that run cases one after another, each a stream of its own; one that dies or hangs has found something."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import torch

from tools.fuzz.draw import Name
from tools.fuzz.judge import judge
from tools.fuzz.kinds import builder
from tools.fuzz.report import Finding

WORKER = (sys.executable, "-m", "tools.fuzz.worker")
BROKEN = ("CUDA error", "illegal memory access", "device-side assert")  # a process can do no more after these


@dataclass(frozen=True)
class Plan:
    """What a run is asked for. `cases` counts those of one worker, 0 for any; `hang_s` is without any progress."""

    seed: str
    device: str
    seconds: float
    jobs: int
    cases: int = 0
    only: tuple[str, ...] = ()
    small: bool = False
    hang_s: float = 300.0
    firsts: tuple[int, ...] = ()


def run_one(name: Name, plan: Plan, progress: Callable[[str], None] = lambda stage: None) -> Finding | None:
    """One case; None where its kind was not asked for."""
    kind, build = builder(name, plan.device, plan.small)
    if plan.only and kind not in plan.only:
        return None
    progress(kind)
    found = judge(build, progress)
    return Finding(str(name), kind, found.verdict, found.reason, found.text if found.verdict == "failed" else "")


def work(plan: Plan, worker: int, first: int) -> None:
    """In a process of its own: case after case, each stage a line of standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints goes elsewhere
    torch.set_num_threads(1)
    if plan.device == "cuda":
        _look_harder()
    end, case, done = time.monotonic() + plan.seconds, first, 0
    while time.monotonic() < end and (not plan.cases or done < plan.cases):
        name = Name(plan.seed, worker, case)
        tell: Callable[[str], None] = lambda stage, n=name: _say(answers, name=str(n), stage=stage)  # type: ignore[misc] # noqa: E731
        found = run_one(name, plan, tell)
        case += 1
        if found is not None:
            done += 1
            _say(answers, finding=asdict(found))
            if any(words in found.text for words in BROKEN):
                return
    _say(answers, finished=True)


def _look_harder() -> None:
    """Have kernels be looked at for what the compile tier looks for: memory of barriers that is something else, too."""
    from tilewise.ops import triton_compile
    from tilewise.testing.barriers import reused_barriers

    look_at = triton_compile.look_at

    def harder(compiled: Any) -> None:
        look_at(compiled)
        reused = reused_barriers(compiled.asm.get("ptx", ""))
        assert not reused, f"{compiled.metadata.name}: memory of barriers is something else, too, at {reused}"

    triton_compile.look_at = harder


def _say(answers: IO[str], **what: Any) -> None:
    answers.write(json.dumps(what) + "\n")


@dataclass
class _Process:
    """A worker as its parent sees it."""

    worker: int
    running: subprocess.Popen[str]
    errors: IO[bytes]
    at: str = ""  # the case under way
    kind: str = ""
    stage: str = ""
    heard: float = field(default_factory=time.monotonic)
    done: int = 0
    finished: bool = False


class Fleet:
    """All workers of a run."""

    def __init__(self, plan: Plan, command: Sequence[str] = WORKER) -> None:
        self.plan, self.command, self.end = plan, command, time.monotonic() + plan.seconds
        self.lines: queue.Queue[tuple[_Process, str | None]] = queue.Queue()
        firsts = plan.firsts or (0,) * plan.jobs
        self.alive = [self._start(worker, firsts[worker], 0) for worker in range(plan.jobs)]

    def findings(self) -> Iterator[Finding]:
        """Every finding as it comes, until all workers have finished."""
        while self.alive:
            self._end_what_hangs()
            try:
                process, line = self.lines.get(timeout=1.0)
            except queue.Empty:
                continue
            if line is None:
                yield from self._ended(process)
            else:
                yield from self._heard(process, json.loads(line))

    def stop(self) -> None:
        """End every worker that is left."""
        for process in self.alive:
            process.running.kill()
            process.running.wait()

    def _start(self, worker: int, first: int, done: int) -> _Process:
        plan = asdict(self.plan) | {"seconds": max(1.0, self.end - time.monotonic())}
        if plan["cases"]:
            plan["cases"] = max(0, plan["cases"] - done)
        command = [*self.command, json.dumps(plan), str(worker), str(first)]
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed where the process has ended
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        process = _Process(worker, running, errors, done=done)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: _Process) -> None:
        assert process.running.stdout is not None
        for line in process.running.stdout:
            self.lines.put((process, line))
        self.lines.put((process, None))

    def _heard(self, process: _Process, what: dict[str, Any]) -> Iterator[Finding]:
        process.heard = time.monotonic()
        if "stage" in what:
            if what["name"] != process.at:
                process.at, process.kind = what["name"], what["stage"]
            process.stage = what["stage"]
        elif "finding" in what:
            process.at, process.done = "", process.done + 1
            process.finished = any(words in what["finding"]["text"] for words in BROKEN)
            yield Finding(**what["finding"])
            if process.finished:
                process.finished, process.at = False, what["finding"]["name"]
                process.kind = ""  # told already; goes on behind it
        else:
            process.finished = True

    def _end_what_hangs(self) -> None:
        for process in self.alive:
            if time.monotonic() - process.heard > self.plan.hang_s and process.running.poll() is None:
                process.stage = f"no progress for {self.plan.hang_s:.0f} s, in {process.stage}"
                process.running.kill()

    def _ended(self, process: _Process) -> Iterator[Finding]:
        status = process.running.wait()
        self.alive.remove(process)
        process.errors.seek(0)
        last_words = process.errors.read()[-600:].decode(errors="replace")
        process.errors.close()
        if process.finished:
            return
        text = f"the process ended with {status} ({process.stage}): {last_words}"
        if process.kind or not process.at:
            unknown = str(Name(self.plan.seed, process.worker, 0))
            yield Finding(process.at or unknown, process.kind or "start", "failed", "", text)
        if process.at and time.monotonic() < self.end:
            self.alive.append(self._start(process.worker, Name.of(process.at).case + 1, process.done + 1))
