"""Questions `neighbours_forward`, `neighbours_backward` and `neighbours_step`: what stands beside attention in a model.

Rows of 16k x 4096 and 8k x 8192 numbers, bf16 (SwiGLU of gates that wide, RoPE of queries in heads of 128 and a quarter
as many keys), and logits of 4k tokens over 128k classes, each operation beside PyTorch's own in eager mode and under
`torch.compile`. GB/s count the fewest bytes: every input read and every result written once; the copy rate of the same
run is what they are held against.

`neighbours_step` is forward and backward together: time, operations of matrix products and attention, and the memory
that a step adds at most. It is asked of the last linear layer with its loss, 16k tokens of 4096 over 128k classes
(PyTorch's logits stay bf16 there, or become float32 before the loss, `float32_logits`, as models of transformers have
it), and of a whole layer (`benchmarks.layer`), 4 x 4k tokens of 2048.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._functorch.config as functorch
import torch.nn.functional as F

import tilewise as tw
from benchmarks import layer, quack
from benchmarks.cases import Options
from benchmarks.contenders import sources_of
from benchmarks.environment import current
from benchmarks.memory import gpu_peak_mib
from benchmarks.records import Writer
from benchmarks.reference import relative_error
from benchmarks.timing import Call, Timed, ceilings, interleaved, method
from tilewise.explain.neighbours import (
    LOSS,
    SUBJECTS,
    Function,
    Subject,
    Tensors,
    incoming,
    linear_inputs,
    outputs_of,
    placed,
    plain_linear_loss,
)

FORWARD, BACKWARD, STEP = QUESTIONS = ("neighbours_forward", "neighbours_backward", "neighbours_step")
INCLUDES = {
    FORWARD: "one call without gradients",
    BACKWARD: "torch.autograd.grad of all inputs and weights from a saved forward",
}
INCLUDES_LOSS = "loss, and torch.autograd.grad of x and weight"
INCLUDES_LAYER = "the layer's two outputs, and torch.autograd.grad of its two inputs and all weights"
ROUNDS = 30
METRIC = "relative l2 to float64, the worst of all results"


def run(options: Options) -> None:
    """Measure what is wanted: parts are the operations, "cross_entropy", "linear_cross_entropy" and "layer"."""
    device = options.device
    if options.quick:
        shapes, losses, linear = ((6, 512),), ((5, 40),), (12, 16, 40)
    else:
        shapes, losses, linear = ((16_384, 4096), (8192, 8192)), ((4096, 131_072),), (16_384, 4096, 131_072)
    ceiling = ceilings(device) if not options.quick else ceilings(device, size=128, copy_bytes=2**20)
    rounds = min(options.rounds, ROUNDS)
    peers, says = quack.find(device)
    print(says, flush=True)
    writer = Writer(current(device), method=f"{method(device, rounds)}; {says}", ceilings=ceiling, results=options.out)
    with functorch.patch(donated_buffer=False):  # what is kept is used again in each round
        for name, subject in (*SUBJECTS.items(), ("cross_entropy", LOSS)):
            if options.wants(name.split(",")[0]):
                for rows, width in losses if subject is LOSS else shapes:
                    _measure(name, subject, (rows, width), writer, device, rounds, not options.quick, peers.get(name))
    if options.wants("linear_cross_entropy"):
        _measure_loss(linear, writer, device, rounds, not options.quick)
    if options.wants("layer"):
        _measure_layer(writer, device, rounds, options.quick)


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _contenders(ours: Function, plain: Function, device: str, compiled: bool) -> dict[str, Function]:
    row = "triton" if device == "cuda" else "cpu"
    found = {f"tilewise.{row}": lambda **inputs: ours(**inputs, impl=row), "eager": lambda **x: plain(*x.values())}
    if compiled:
        torch._dynamo.reset()
        fused = torch.compile(plain, dynamic=False)
        found["compile"] = lambda **inputs: fused(*inputs.values())
    return found


def _measure(
    name: str, subject: Subject, shape: tuple[int, int], writer: Writer, device: str, rounds: int, compiled: bool,
    peer: Function | None,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    inputs = placed(subject.make(*shape), device, _dtype(device))
    want = _reference(subject, inputs)
    functions = _contenders(subject.ours, subject.plain, device, compiled) | ({"quack": peer} if peer else {})
    fewest = subject.fewest(inputs)
    problem = {"operation": name, "shape": f"{shape[0]:,} × {shape[1]:,}", "dtype": str(inputs["x"].dtype)[6:]}
    for question, calls, nbytes in (
        (FORWARD, {key: _forward(f, inputs) for key, f in functions.items()}, fewest[0]),
        (BACKWARD, _backwards(functions, inputs), fewest[1]),
    ):
        timed = interleaved(calls, device=device, rounds=rounds)
        for key, result in timed.items():
            got = None if result.failure else outputs_of(calls[key]())
            _write(writer, question, problem, key, result, got, want[question], includes=INCLUDES[question],
                   sources=sources_of(key, subject.operation), gbps=nbytes)  # fmt: skip


def _forward(function: Function, inputs: Tensors) -> Call:
    def call() -> object:
        with torch.no_grad():
            return function(**inputs)

    return call


def _backwards(functions: dict[str, Function], inputs: Tensors) -> dict[str, Call]:
    wanted = [x for x in inputs.values() if x.requires_grad]

    def of(function: Function) -> Call:
        state: dict[str, Any] = {}

        def call() -> object:
            if not state:  # while it warms up, where an error is kept
                state["outputs"] = outputs_of(function(**inputs))
                state["incoming"] = incoming(state["outputs"], inputs["x"].dtype)
            return torch.autograd.grad(state["outputs"], wanted, state["incoming"], retain_graph=True)

        return call

    return {key: of(function) for key, function in functions.items()}


def _reference(subject: Subject, inputs: Tensors) -> dict[str, tuple[torch.Tensor, ...]]:
    """Results and gradients in float64."""
    exact = {name: x.detach().double().requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    outputs = outputs_of(subject.plain(*exact.values()))
    wanted = [x for x in exact.values() if x.requires_grad]
    gradients = torch.autograd.grad(outputs, wanted, incoming(outputs, inputs["x"].dtype))
    return {FORWARD: tuple(x.detach() for x in outputs), BACKWARD: gradients}


def _measure_loss(sizes: tuple[int, int, int], writer: Writer, device: str, rounds: int, compiled: bool) -> None:
    tokens, hidden, classes = sizes
    torch.manual_seed(0)
    inputs = placed(linear_inputs(*sizes), device, _dtype(device))

    def step(function: Function) -> Call:
        def call() -> object:
            loss = function(**inputs)
            return loss.detach(), *torch.autograd.grad(loss, (inputs["x"], inputs["weight"]))

        return call

    def wide(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target)

    functions = _contenders(tw.linear_cross_entropy, plain_linear_loss, device, compiled)
    functions["eager.float32_logits"] = lambda **inputs: wide(**inputs)
    calls = {key: step(function) for key, function in functions.items()}
    problem = {"operation": "linear_cross_entropy", "shape": f"{tokens:,} × {hidden:,} × {classes:,}",
               "dtype": str(inputs["x"].dtype)[6:]}  # fmt: skip
    _write_steps(writer, problem, calls, _loss_of_chunks(inputs), device=device, rounds=rounds, includes=INCLUDES_LOSS,
                 sources=lambda key: sources_of(key, "cross_entropy"),
                 tflops=6 * tokens * hidden * classes)  # fmt: skip


def _loss_of_chunks(inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """The loss in float64."""
    x, weight, target = (y.detach() for y in inputs.values())
    weight = weight.double()
    total = sum(
        F.cross_entropy(part.double() @ weight.t(), of_part, reduction="sum")
        for part, of_part in zip(x.split(512), target.split(512), strict=True)
    )
    return (torch.as_tensor(total / len(target)),)


def _measure_layer(writer: Writer, device: str, rounds: int, quick: bool) -> None:
    dtype = _dtype(device)
    one = layer.make(layer.SMALL, 2, device, dtype) if quick else layer.make(layer.LARGE, 4, device, dtype)
    problem = {"operation": "layer", "shape": one.shape, "dtype": str(dtype)[6:]}
    _write_steps(writer, problem, one.contenders(compiled=not quick), one.reference(), device=device, rounds=rounds,
                 includes=INCLUDES_LAYER, sources=lambda key: layer.sources_of(key, device),
                 tflops=one.operations)  # fmt: skip


def _write_steps(
    writer: Writer, problem: dict[str, Any], calls: Mapping[str, Call], want: tuple[torch.Tensor, ...], *, device: str,
    rounds: int, includes: str, sources: Callable[[str], str | None], tflops: float,
) -> None:  # fmt: skip
    """Time steps in turns and write them down; `want` are the first of what a step gives."""
    timed = interleaved(calls, device=device, rounds=rounds)
    for key, result in timed.items():
        got, memory = None, None
        if not result.failure:
            memory = gpu_peak_mib(calls[key]) if device == "cuda" else None
            got = calls[key]()[: len(want)]  # type: ignore[index]
        _write(writer, STEP, problem, key, result, got, want, includes=includes, sources=sources(key), tflops=tflops,
               peak_mib=memory)  # fmt: skip


def _write(
    writer: Writer, question: str, problem: dict[str, Any], key: str, result: Timed,
    got: tuple[torch.Tensor, ...] | None, want: tuple[torch.Tensor, ...], *, includes: str, sources: str | None,
    gbps: float | None = None, tflops: float | None = None, peak_mib: float | None = None,
) -> None:  # fmt: skip
    """A record of one contender; `gbps` are bytes and `tflops` operations of a call."""
    times = result.quantiles
    error = {"metric": "failure", "message": result.failure}
    if got is not None:
        value = max(relative_error(x.detach(), y) for x, y in zip(got, want, strict=True))
        error = {"metric": METRIC, "value": value}
    writer.write(
        question, problem, key, times_ms=times, gbps=gbps / times[1] / 1e6 if gbps and times else None,
        tflops=tflops / times[1] / 1e9 if tflops and times else None, error=error, includes=includes,
        sources=sources, peak_mib=peak_mib,
    )  # fmt: skip
