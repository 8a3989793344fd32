"""Train one model for each set of operators, in step: same weights, batches and optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewise.demo.model import Llama, ModelConfig
from tilewise.demo.operators import Operators
from tilewise.demo.optim import Optimizer, schedule


@dataclass
class Learner:
    """A model that learns through one set of operators for `steps` steps; losses (nats a token) and seconds by step."""

    name: str
    model: Llama
    device: torch.device
    dtype: torch.dtype
    steps: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = Optimizer(self.model)

    @classmethod
    def create(
        cls,
        name: str,
        operators: Operators,
        config: ModelConfig,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        steps: int,
    ) -> Learner:
        """A learner whose weights depend on `seed` alone (drawn on the CPU, whatever the device)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Llama(config, operators)
        return cls(name, model.to(device), device, dtype, steps)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; inputs and targets are (batch, seqlen) int64 on the CPU."""
        mixed = self.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype if mixed else None, enabled=mixed):
            return self.model.loss(inputs.to(self.device), targets.to(self.device))

    def step(self, inputs: Tensor, targets: Tensor, share: float) -> float:
        """Forward, backward and update at `share` of the learning rate; returns the loss before the update."""
        start = time.perf_counter()
        loss = self.loss(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(share)
        self.losses.append(loss.item())  # also waits for the GPU
        self.seconds.append(time.perf_counter() - start)
        return self.losses[-1]

    @property
    def median_ms(self) -> float:
        """Median time of a step in milliseconds."""
        return sorted(self.seconds)[len(self.seconds) // 2] * 1e3


def train(
    learners: list[Learner], data: Iterator[tuple[Tensor, Tensor]], steps: int, report: Callable[[int], None]
) -> None:
    """Take all learners through the same batches, each for its own number of steps; `report(step)` after each step.

    On a CPU with several threads two lanes of learners run side by side, each with its share of the threads: small
    products gain less from a second thread than a second model does, and threads that wait for each other stall where
    the cores are busy.
    """

    def advance(lane: list[Learner], step: int, inputs: Tensor, targets: Tensor) -> None:
        for learner in lane:
            if step < learner.steps:
                learner.step(inputs, targets, schedule(step, steps))

    number = torch.get_num_threads()
    beside = learners[0].device.type == "cpu" and len(learners) > 1 and number > 1
    with ThreadPoolExecutor(1) as pool, threads(number // 2 if beside else number):
        for step, (inputs, targets) in enumerate(data):
            if beside:
                other = pool.submit(advance, learners[1::2], step, inputs, targets)
                advance(learners[0::2], step, inputs, targets)
                other.result()
            else:
                advance(learners, step, inputs, targets)
            report(step)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """PyTorch's CPU threads, `number` for each thread of Python, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def held_out_loss(learner: Learner, stream: Tensor, *, batch: int, windows: int = 32) -> float:
    """Mean loss in nats a token over up to `windows` windows spread evenly over `stream`."""
    seqlen = min(learner.model.config.seqlen, stream.numel() - 1)
    windows = max(1, min(windows, (stream.numel() - 1) // seqlen))
    start = torch.linspace(0, stream.numel() - 1 - seqlen, windows).long()
    tokens = stream[start[:, None] + torch.arange(seqlen + 1)]
    parts = torch.split(tokens, batch)
    return sum(float(learner.loss(part[:, :-1], part[:, 1:])) * len(part) for part in parts) / windows
