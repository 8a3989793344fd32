"""When the parts of an engine run, step by step, noted from outside: the functions that a step calls are replaced while
a tracer is entered, so that an engine that nobody traces runs no instruction more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.engine import Engine, forward, runner
from tilewise.engine.models import decoder
from tilewise.ops.attention.planned import AttentionPlan
from tilewise.ops.qkv_prologue import QKVPrologue

HOST = ("plan", "send", "launch", "wait", "take")
ROTATION = "rotation and KV write"
COMPUTE = ("embedding", "norm", "projections", ROTATION, "attention", "MLP", "head", "sampling", "other")
# where a step looks a function up, its name there, and what its time counts as
_OPERATIONS = (
    (QKVPrologue, "run", ROTATION),
    (forward, "plan", "attention"),
    (AttentionPlan, "run", "attention"),
    (runner, "choose", "sampling"),
)
_NOTHING = 1e-6  # milliseconds: two stamps of one call


@dataclass(frozen=True)
class Span:
    """What ran from `begin` to `end`, in milliseconds since tracing began.

    Attributes:
        lane: "host", or "compute" for the model on the device; on a CPU one thread runs both.
        kind: one of `HOST` or of `COMPUTE`.
        begin, end: milliseconds.
    """

    lane: str
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class TracedStep:
    """One call of `Engine.advance`.

    Attributes:
        begin, end: of the call, in milliseconds since tracing began.
        counts: new tokens of each sample that it computes, 1 for those that decode.
        spans: what ran; none of a lane overlap. On a GPU those of the device may end after the call.
    """

    begin: float
    end: float
    counts: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def ms(self) -> float:
        """Milliseconds of the call."""
        return self.end - self.begin

    @property
    def decoding(self) -> int:
        """Samples with one new token."""
        return sum(count == 1 for count in self.counts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts, those of one token left out."""
        return sum(count for count in self.counts if count > 1)

    def total(self, *kinds: str) -> float:
        """Milliseconds of these kinds."""
        return sum(span.end - span.begin for span in self.spans if span.kind in kinds)


class Tracer:
    """Notes what the steps of an engine do while it is entered; `steps` has them afterwards.

    On a CPU a clock is read where parts begin and end. On a GPU the model's parts lie between CUDA events: their times
    contain what the device waits for launches, and of a step that is replayed from a CUDA graph there is but the whole,
    as "other".

    Args:
        engine: whose steps.
        compute: whether to note the parts of the model; without them the clock is read a dozen times a step.
    """

    def __init__(self, engine: Engine, *, compute: bool = True) -> None:
        self._engine, self._compute = engine, compute
        self._on_gpu = engine.decoder.device.type == "cuda"
        self._host = _Lane(time.perf_counter)
        self._device = _Lane(_event) if self._on_gpu else self._host
        self._noted: list[_Noted] = []
        self._counts: tuple[int, ...] = ()
        self._open = contextlib.ExitStack()
        self.steps: list[TracedStep] = []

    def __enter__(self) -> Tracer:
        engine, enter = self._engine, self._open.enter_context
        enter(_replaced(engine, "advance", self._advance(engine.advance)))
        enter(_replaced(engine.runner, "launch", self._launch(engine.runner.launch)))
        for owner, name, kind in (
            (engine, "_launch", "launch"),
            (engine, "_take", "take"),
            (engine.scheduler, "plan", "plan"),
            (engine.runner, "seat", "send"),
            (runner, "send_lists", "send"),
            (runner.Step, "wait", "wait"),
        ):
            enter(_replaced(owner, name, self._timed(self._host, kind, getattr(owner, name))))
        if self._compute:
            for module, name, kind in _OPERATIONS:
                enter(_replaced(module, name, self._timed(self._device, kind, getattr(module, name))))
            model = engine.decoder
            for name, kind in (("logits", "head"), ("_normed", "norm"), ("_swiglu", "MLP")):
                enter(_replaced(model, name, self._timed(self._device, kind, getattr(model, name))))
            enter(_replaced(model, "_linear", self._products(model._linear)))
            enter(_replaced(decoder, "F", _Functional(self._timed(self._device, "embedding", F.embedding))))
        if self._on_gpu:
            torch.cuda.synchronize(engine.decoder.device)
            self._began = _event()
        self._since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        if self._on_gpu:
            torch.cuda.synchronize(self._engine.decoder.device)
        self.steps = [self._step(noted) for noted in self._noted]

    def _timed(self, lane: _Lane, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if lane is not self._host and torch.cuda.is_current_stream_capturing():
                return function(*args, **kwargs)  # events of a graph have no time
            lane.enter(kind)
            try:
                return function(*args, **kwargs)
            finally:
                lane.leave()

        return timed

    def _products(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`Decoder._linear`: a product counts as what its weight is for."""
        by_kind = {kind: self._timed(self._device, kind, function) for kind in ("projections", "MLP")}
        of_weight: dict[int, Callable[..., Any]] = {}
        for layer in self._engine.decoder.layers:
            of_weight |= dict.fromkeys(map(id, (layer.qkv, layer.o)), by_kind["projections"])
            of_weight |= dict.fromkeys(map(id, (layer.gate_up, layer.down)), by_kind["MLP"])
        return lambda x, weight, bias: of_weight[id(weight)](x, weight, bias)

    def _advance(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """`Engine.advance`; what of it is no other part hands out results."""
        timed = self._timed(self._host, "take", function)

        def advance() -> Any:
            first, began, self._counts = (len(self._host.pieces), len(self._device.pieces)), time.perf_counter(), ()
            try:
                return timed()
            finally:
                host = self._host.pieces[first[0] :]
                device = [] if self._device is self._host else self._device.pieces[first[1] :]
                self._noted.append(_Noted(began, time.perf_counter(), self._counts, host, device))

        return advance

    def _launch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`Runner.launch`, the whole of it on the device where that is a GPU."""
        timed = self._timed(self._device, "other", function) if self._on_gpu else function

        def launch(work: Any, *args: Any, **kwargs: Any) -> Any:
            self._counts = tuple(each.count for each in work)
            return timed(work, *args, **kwargs)

        return launch

    def _step(self, noted: _Noted) -> TracedStep:
        of_host = [_span(kind, *map(self._of_host, stamps)) for kind, *stamps in noted.host]
        of_device = [_span(kind, *map(self._of_device, stamps)) for kind, *stamps in noted.device]
        spans = tuple(span for span in (*of_host, *of_device) if span.end - span.begin > _NOTHING)
        return TracedStep(self._of_host(noted.began), self._of_host(noted.ended), noted.counts, spans)

    def _of_host(self, stamp: float) -> float:
        return (stamp - self._since) * 1e3

    def _of_device(self, stamp: Any) -> float:
        return float(self._began.elapsed_time(stamp))


class _Lane:
    """Pieces of time that do not overlap: a part that calls another one is interrupted by it."""

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self._running: list[str] = []
        self._since: Any = None
        self.pieces: list[tuple[str, Any, Any]] = []  # kind, begin, end

    def enter(self, kind: str) -> None:
        stamp = self._now()
        if self._running:
            self.pieces.append((self._running[-1], self._since, stamp))
        self._running.append(kind)
        self._since = stamp

    def leave(self) -> None:
        stamp = self._now()
        self.pieces.append((self._running.pop(), self._since, stamp))
        self._since = stamp


@dataclass(frozen=True)
class _Noted:
    """A step's stamps; those of the device are read when it has got there."""

    began: float
    ended: float
    counts: tuple[int, ...]
    host: list[tuple[str, Any, Any]]
    device: list[tuple[str, Any, Any]]


class _Functional:
    """torch.nn.functional as the decoder sees it, with another embedding."""

    def __init__(self, embedding: Callable[..., Any]) -> None:
        self.embedding = embedding

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _span(kind: str, begin: float, end: float) -> Span:
    return Span("host" if kind in HOST else "compute", kind, begin, end)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute with another value, for a while."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)  # the class has it
