"""`tilewise bench neighbours`: what stands beside attention in a model, against PyTorch's own on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Annotated, Any

import torch
import typer

import tilewise
from tilewise.cli import shapes
from tilewise.cli.output import guarded, machine, say_json, table
from tilewise.cli.timing import Timed, apart, backward_of, copy_rate, forward_of, quantiles, repeat
from tilewise.core.errors import InputError, TilewiseError, UnsupportedError
from tilewise.explain import neighbours as known
from tilewise.explain.neighbours import Function, Tensors

_HEADS = 4 * known.HEAD_DIM  # of queries to one of keys: what RoPE's width is a multiple of


class Operation(str, Enum):
    """What is timed; rms_norm with and without a residual."""

    rms_norm = "rms_norm"
    layer_norm = "layer_norm"
    softmax = "softmax"
    swiglu = "swiglu"
    rope = "rope"
    cross_entropy = "cross_entropy"
    linear_cross_entropy = "linear_cross_entropy"


@dataclass(frozen=True)
class Cell:
    """One row of the table. `share` is of the copy rate, `speedup` PyTorch's eager median over this one's, `difference`
    the largest from its result.
    """

    operation: str
    shape: tuple[int, ...]
    direction: str
    impl: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    repeats: int
    gbps: float
    share: float
    speedup: float
    difference: float | None


@dataclass(frozen=True)
class Question:
    """One problem: its inputs, ours, PyTorch's, and for each direction the fewest bytes and how it is called."""

    name: str
    shape: tuple[int, ...]
    inputs: Tensors
    ours: Function
    plain: Function
    directions: dict[str, tuple[int, Callable[[Function, Tensors], Timed]]]


@guarded
def neighbours(
    operation: Annotated[
        list[Operation] | None,
        typer.Option(
            "--operation", "-o", help="What to time; give it again for more. Default: all.", show_default=False
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows, or tokens. Default: 16384 on a GPU, 4096 on a CPU.")
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(min=1, help="Numbers of a row; of a gate, and of all query heads. Default: 4096, 2048 on a CPU."),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="Classes of the losses. Default: 32768 on a GPU, 4096 on a CPU.")
    ] = None,
    dtype: Annotated[shapes.Dtype | None, typer.Option(help="Default: bf16 on a GPU, fp32 on a CPU.")] = None,
    device: shapes.Device = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also time torch.compile of PyTorch's version; it compiles first.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Time to spend on one row of the table, about.", min=0.01)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the random tensors.")] = 0,
    as_json: shapes.Json = False,
) -> None:
    """Time norms, softmax, SwiGLU, RoPE and losses against eager PyTorch, forward and backward.

    GB/s count the fewest bytes: every input read and every result written once. Their share is of the rate of a copy of
    256 MiB, measured in the same run; tensors that a cache holds may pass it. linear_cross_entropy is timed forward and
    backward together, since it makes gradients in the forward; its products, not its bytes, are what it waits for. The
    last column is the largest difference from eager PyTorch's results.

    Example: tilewise bench neighbours -o rms_norm -o swiglu --rows 8192 --width 4096 --compile
    """
    where = shapes.device(device)
    gpu = where.type == "cuda"
    kind = dtype or (shapes.Dtype.bf16 if gpu else shapes.Dtype.fp32)
    wanted = list(Operation) if not operation else [name for name in Operation if name in operation]
    rows, width = rows or (16_384 if gpu else 4096), width or (4096 if gpu else 2048)
    if Operation.rope in wanted and width % _HEADS:
        hint = f"heads of {known.HEAD_DIM}, four of queries to one of keys; or leave rope out by -o"
        raise InputError("--width", got=width, expected=f"a multiple of {_HEADS} for rope", hint=hint)
    sizes = (rows, width, classes or (32_768 if gpu else 4096))
    ceiling = copy_rate(where, seconds)
    cells: list[Cell] = []
    for name in wanted:
        for question in _questions(name.value, sizes, where, kind.torch, seed):
            try:
                cells += _measure(question, compiled=compiled, seconds=seconds, ceiling=ceiling)
            except torch.OutOfMemoryError as error:
                got = f"{question.name} of {question.shape} numbers, out of memory"
                hint = "--rows, --width, --classes, or fewer operations by -o"
                raise InputError("--rows", got=got, expected="a problem that fits", hint=hint) from error
    if as_json:
        head = {"device": machine(where), "torch": torch.__version__, "dtype": kind.value, "copy_gbps": ceiling}
        say_json({**head, "rows": [asdict(cell) for cell in cells]})
        return
    columns = (
        "operation", "shape", "direction", "implementation", "p20 ms", "median ms", "p80 ms", "GB/s", "of copy",
        "vs eager", "max diff",
    )  # fmt: skip
    lines = [
        (
            cell.operation,
            " × ".join(map(str, cell.shape)),
            cell.direction,
            cell.impl,
            *(f"{ms:.3f}" for ms in (cell.p20_ms, cell.p50_ms, cell.p80_ms)),
            f"{cell.gbps:.1f}" if cell.gbps < 100 else f"{cell.gbps:.0f}",
            f"{cell.share:.2f}",
            f"{cell.speedup:.2f}×",
            "" if cell.difference is None else f"{cell.difference:.1e}",
        )
        for cell in cells
    ]
    table(f"{kind.value} on {where}, copy {ceiling:,.0f} GB/s", columns, lines, left=4)


def _questions(
    name: str, sizes: tuple[int, int, int], where: torch.device, dtype: torch.dtype, seed: int
) -> Iterator[Question]:
    """The problems of one operation, made when it is their turn, for the memory of one."""
    rows, width, classes = sizes
    row = "triton" if where.type == "cuda" else "cpu"
    torch.manual_seed(seed)
    if name == "linear_cross_entropy":
        with where:
            inputs = known.placed(known.linear_inputs(*sizes), where, dtype)
        nbytes = 2 * (inputs["x"].nbytes + inputs["weight"].nbytes)  # both read, and a gradient of each
        yield Question(
            name, sizes, inputs, lambda **x: tilewise.linear_cross_entropy(**x, impl=row),
            lambda **x: known.plain_linear_loss(**x), {"step": (nbytes, _step)},
        )  # fmt: skip
        return
    for key, subject in (*known.SUBJECTS.items(), ("cross_entropy", known.LOSS)):
        if key.split(",")[0] == name:
            shape = (rows, classes if subject is known.LOSS else width)
            with where:
                inputs = known.placed(subject.make(*shape), where, dtype)
            forward, backward = subject.fewest(inputs)
            yield Question(
                key, shape, inputs, lambda _ours=subject.ours, **x: _ours(**x, impl=row),
                lambda _plain=subject.plain, **x: _plain(*x.values()),
                {"forward": (forward, _forward), "backward": (backward, _backward)},
            )  # fmt: skip


def _measure(question: Question, *, compiled: bool, seconds: float, ceiling: float) -> list[Cell]:
    """All contenders in each direction."""
    inputs = question.inputs
    place = inputs["x"].device
    contenders = {
        f"tilewise.{'triton' if place.type == 'cuda' else 'cpu'}": question.ours,
        "eager": question.plain,
        **({"compile": _compiled(question.plain)} if compiled else {}),
    }
    cells = []
    for direction, (nbytes, timed) in question.directions.items():
        results, times = {}, {}
        for name, function in contenders.items():
            with _buffers_kept() if name == "compile" else nullcontext():
                call, results[name] = timed(function, inputs)
                times[name] = repeat(call, place, seconds)
        for name, ms in times.items():
            p20, p50, p80 = quantiles(ms)
            gbps = nbytes / p50 / 1e6
            difference = None if name == "eager" else apart(results[name], results["eager"])
            speedup = quantiles(times["eager"])[1] / p50
            cells.append(
                Cell(
                    question.name, question.shape, direction, name, p20, p50, p80, len(ms), gbps, gbps / ceiling,
                    speedup, difference,
                )
            )  # fmt: skip
    return cells


def _forward(function: Function, inputs: Tensors) -> Timed:
    return forward_of(lambda: function(**inputs))


def _backward(function: Function, inputs: Tensors) -> Timed:
    with torch.no_grad():
        outputs = known.outputs_of(function(**inputs))
    do = known.incoming(outputs, inputs["x"].dtype)
    return backward_of(lambda: function(**inputs), _leaves(inputs), do)


def _step(function: Function, inputs: Tensors) -> Timed:
    def call() -> tuple[torch.Tensor, ...]:
        loss = function(**inputs)
        return loss.detach(), *torch.autograd.grad(loss, _leaves(inputs))

    return call, tuple(x.float() for x in call())


def _leaves(inputs: Tensors) -> Sequence[torch.Tensor]:
    return [x for x in inputs.values() if x.requires_grad]


def _compiled(plain: Function) -> Function:
    """torch.compile of it; what keeps it from compiling is an error of ours, with its first line."""
    torch._dynamo.reset()
    fused = torch.compile(plain, dynamic=False)

    def call(**inputs: torch.Tensor) -> Any:
        try:
            return fused(**inputs)
        except (TilewiseError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            got = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            hint = "leave --compile out; on a CPU it needs a C++ compiler"
            raise UnsupportedError("--compile", got=got, expected="code that compiles", hint=hint) from error

    return call


def _buffers_kept() -> Any:
    """What a compiled forward keeps is used again in each backward that is timed."""
    import torch._functorch.config as functorch

    return functorch.patch(donated_buffer=False)
