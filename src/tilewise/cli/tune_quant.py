"""`tilewise tune-quant`: which scheme of quantized attention is accurate enough on your q, k and v."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer

from tilewise.cli import dumps, shapes
from tilewise.cli.output import FAILED, guarded, machine, say, say_json, table
from tilewise.cli.timing import quantiles, repeat
from tilewise.core.errors import InputError, TilewiseError
from tilewise.explain.accuracy import SCHEMES, Trials, name_of, picked, try_schemes
from tilewise.quant.schemes import parse_scheme

Chosen = dict[int | None, str | None]  # name of the chosen scheme (None: none fits) by head (None: all heads)
DEMO_TOKENS = 512
OF_DEMO = "demo: topics and demo: outliers are synthetic layers: q, k and v of no model."
LEGEND = (
    '"as they are" is attention without quantize=. --max-error limits the relative L1. > is the choice for all heads:\n'
    "{choice}."
)
BY_TIME = "the fastest scheme within {max_error:g}"
BY_BITS = "the cheapest scheme within {max_error:g}, which need not be the fastest"
RANKS = (
    "No GPU, so nothing is timed. The cheapest has the fewest bits in the operands of both products, then the fewest\n"
    "smoothed or rotated of q, k and v, then the fewest scales."
)


@guarded
def tune_quant(
    files: dumps.Files = None,
    demo: dumps.Demo = False,
    layout: dumps.LayoutOf = dumps.Layout.bshd,
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            "--scheme",
            metavar="SCHEME",
            help='A scheme to try, such as "Sage(qk=int8,rotate=hadamard)"; may be repeated. Default: the published'
            " ones and more.",
        ),
    ] = None,
    max_error: Annotated[float, typer.Option(help="Largest relative L1 error to accept.", min=0.0)] = 0.05,
    per_head: Annotated[bool, typer.Option("--per-head", help="Also choose for each head.")] = False,
    rows: Annotated[
        int, typer.Option(min=1, help="Queries to compare with exact attention, evenly spaced; all if there are fewer.")
    ] = 512,
    causal: shapes.Causal = False,
    mask: shapes.MaskText = None,
    scale: shapes.Scale = None,
    device: shapes.Device = None,
    seconds: Annotated[
        float, typer.Option(help="Time to spend on timing each scheme on a GPU, about.", min=0.01)
    ] = 0.2,
    as_json: shapes.Json = False,
) -> None:
    """Try schemes of quantized attention on your own q, k and v, and pick the fastest that is accurate enough.

    Each scheme is compared with exact attention in float64: cosine, relative L1, root mean square and largest error,
    and the head with the largest relative L1. MB counts codes, scales and means. On a GPU the fastest scheme is the one
    with the least median time, quantization included; on a CPU, where quantized attention is emulated, schemes are
    ranked by bits. Exit code 1 if no scheme is accurate enough for some layer, or with --per-head for some head.

    Example: tilewise tune-quant layer0.pt layer1.pt --causal --max-error 0.03 --per-head
    """
    where = shapes.device(device)
    gpu = where.type == "cuda"
    schemes = tuple(parse_scheme(text) for text in scheme) if scheme else SCHEMES
    seen = dumps.mask_of(causal, mask, demo, where)
    found: list[dict[str, Any]] = []
    lacking = False
    for layer in dumps.layers("tune-quant", files, demo, layout, where, seqlen=DEMO_TOKENS):
        name, tensors = layer.name, layer.load()
        try:
            tried = try_schemes(
                *tensors, schemes, mask=seen, scale=scale, rows=rows,
                clock=(lambda call: quantiles(repeat(call, where, seconds))[1]) if gpu else None,
            )  # fmt: skip
        except TilewiseError as error:
            raise InputError(
                f"{name}: {error.name}", got=error.got, expected=error.expected, hint=error.hint
            ) from error
        heads: list[int | None] = [None, *(range(tensors[0].shape[2]) if per_head else ())]
        chosen = {head: _best(tried, max_error, head, gpu) for head in heads}
        lacking |= None in chosen.values()
        if as_json:
            found.append(_data(name, tensors, tried, chosen))
            continue
        compared = len(picked(tensors[0].shape[1], rows))
        _show(f"{name}: {_described(tensors)}; {compared} queries compared", tried, chosen[None])
        for head, best in chosen.items():
            whose = "all heads" if head is None else f"head {head}"
            say(f"within {max_error:g}, {whose}: {best or 'no scheme'}")
    if as_json:
        about = {"device": machine(where), "torch": torch.__version__, "mask": None if seen is None else repr(seen)}
        say_json({**about, "ranked_by": "time" if gpu else "bits", "max_error": max_error, "layers": found})
    else:
        choice = (BY_TIME if gpu else BY_BITS).format(max_error=max_error)
        say("\n".join([*([OF_DEMO] if demo else []), LEGEND.format(choice=choice), *([] if gpu else [RANKS])]))
    if lacking:
        raise typer.Exit(FAILED)


def _best(tried: Trials, max_error: float, head: int | None, gpu: bool) -> str | None:
    """The name of the chosen scheme; None if no scheme is accurate enough."""
    if not any(trial.scheme is not None and trial.error(head) <= max_error for trial in tried.ran):
        return None
    trial = tried.choose(max_error, head, by_time=gpu)
    return None if trial is None else name_of(trial.scheme)


def _data(name: str, tensors: tuple[torch.Tensor, ...], tried: Trials, chosen: Chosen) -> dict[str, Any]:
    return {
        "name": name,
        "shapes": [list(x.shape) for x in tensors],
        "dtype": str(tensors[0].dtype).removeprefix("torch."),
        "trials": [
            {
                "scheme": name_of(trial.scheme),
                **asdict(trial.accuracy),
                "worst_head": trial.accuracy.worst_head,
                "nbytes": trial.nbytes,
                "ms": trial.ms,
            }
            for trial in tried.ran
        ],
        "left_out": [{"scheme": name_of(scheme), "reason": reason} for scheme, reason in tried.left_out],
        "chosen": chosen[None],
        "chosen_by_head": [best for head, best in chosen.items() if head is not None],
    }


def _described(tensors: tuple[torch.Tensor, ...]) -> str:
    q, k, _ = tensors
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, {str(q.dtype).removeprefix('torch.')} on {q.device}"


def _show(title: str, tried: Trials, best: str | None) -> None:
    timed = any(trial.ms is not None for trial in tried.ran)
    columns = (
        "",
        "scheme",
        "cosine",
        "relative L1",
        "RMSE",
        "max error",
        "worst head",
        "MB",
        *(["ms"] if timed else []),
    )
    lines = [
        (
            ">" if name_of(trial.scheme) == best else "",
            name_of(trial.scheme),
            f"{trial.accuracy.cosine:.6f}",
            _short(trial.accuracy.relative_l1),
            _short(trial.accuracy.rmse),
            _short(trial.accuracy.largest),
            f"{trial.accuracy.worst_head}: {_short(trial.accuracy.heads[trial.accuracy.worst_head])}",
            f"{trial.nbytes / 1e6:.2f}",
            *(["" if trial.ms is None else f"{trial.ms:.3f}"] if timed else []),
        )
        for trial in tried.ran
    ]
    table(title, columns, lines, left=2)
    for scheme, reason in tried.left_out:
        say(f"left out: {name_of(scheme)}: {reason}")


def _short(error: float) -> str:
    return f"{error:.5f}" if math.isfinite(error) and error >= 1e-4 else f"{error:.1e}"
