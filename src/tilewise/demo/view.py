"""What the demo shows while it runs: on a terminal a progress bar with the loss, elsewhere a line every ten seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tilewise.demo.train import Learner

if TYPE_CHECKING:
    from rich.console import Console


class View:
    """Shows nothing; the others override what they show."""

    learners: Sequence[Learner] = ()

    def note(self, line: str) -> None:
        """A stage has been reached."""

    @contextmanager
    def training(self, steps: int, learners: Sequence[Learner]) -> Iterator[None]:
        """Around the training of `learners` over `steps` steps."""
        self.learners = learners
        yield

    def step(self, step: int) -> None:
        """Step number `step` (from 0) is done; the learners hold its losses."""

    def losses(self, step: int) -> str:
        """The losses of this step, and the largest difference of the first two curves so far, in 45 characters."""
        text = "  ".join(f"{one.name} {one.losses[step]:.3f}" for one in self.learners[:2])
        if len(self.learners) > 1:
            pairs = zip(self.learners[0].losses, self.learners[1].losses, strict=True)
            text += f"  max diff {max(abs(a - b) for a, b in pairs):.0e}"
        return text


class Plain(View):
    """Lines of text: for pipes, logs and files. `every` is the time between two lines of progress, in seconds."""

    def __init__(self, console: Console, every: float = 10.0) -> None:
        self.console, self.every, self.last, self.steps = console, every, 0.0, 0

    def note(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def training(self, steps: int, learners: Sequence[Learner]) -> Iterator[None]:
        self.learners, self.steps, self.last = learners, steps, time.monotonic()
        yield

    def step(self, step: int) -> None:
        if step in (0, self.steps - 1) or time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            self.note(f"step {step + 1:>5}/{self.steps}  loss: {self.losses(step)}")


class Live(Plain):
    """A bar with the share done, the time to go and the losses; fits 80 columns."""

    @contextmanager
    def training(self, steps: int, learners: Sequence[Learner]) -> Iterator[None]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.learners, self.steps = learners, steps
        losses = TextColumn("{task.fields[losses]}", markup=False)
        columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TimeRemainingColumn(), losses)
        with Progress(*columns, console=self.console) as self.progress:
            self.task = self.progress.add_task("training", total=steps, losses="loss …")
            yield

    def step(self, step: int) -> None:
        self.progress.update(self.task, completed=step + 1, losses=f"loss {self.losses(step)}")
