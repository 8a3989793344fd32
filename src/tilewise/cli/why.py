"""`tilewise why`: which implementation would run a call, and why not the others."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

import tilewise
from tilewise.cli import shapes
from tilewise.cli.expression import read_mask, read_score
from tilewise.cli.output import FAILED, guarded, say, say_json, table
from tilewise.quant.schemes import parse_scheme


class Extra(str, Enum):
    """Other arguments of a call."""

    sink = "sink"
    dropout = "dropout"
    deterministic = "deterministic"
    batch_invariant = "batch-invariant"
    no_grad = "no-grad"


@guarded
def why(
    context: typer.Context,
    batch: shapes.Batch = 1,
    seqlen_q: shapes.SeqlenQ = 1024,
    seqlen_k: shapes.SeqlenK = None,
    heads_q: shapes.HeadsQ = 8,
    heads_kv: shapes.HeadsKV = None,
    head_dim: shapes.HeadDim = 128,
    head_dim_v: shapes.HeadDimV = None,
    packed: Annotated[
        str | None,
        typer.Option(
            "--packed",
            metavar="LENGTHS",
            help="Packed sequences of these lengths, such as 1024,512,7; replaces --batch and --seqlen-q/-k.",
            rich_help_panel=shapes.SHAPE,
        ),
    ] = None,
    mask: shapes.MaskText = None,
    score: shapes.ScoreText = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME",
            help='Quantized attention, such as "Sage2()" or "FP8(q_scale=block)".',
            rich_help_panel=shapes.FORMULA,
        ),
    ] = None,
    dtype: Annotated[shapes.Dtype | None, typer.Option(help="Default: bf16 on a GPU, fp32 on a CPU.")] = None,
    device: shapes.Device = None,
    impl: Annotated[
        str | None,
        typer.Option("--impl", help="Ask for this implementation, as impl= does.", rich_help_panel=shapes.MACHINE),
    ] = None,
    extra: Annotated[
        list[Extra] | None,
        typer.Option(
            "--with",
            help="Another argument of the call; may be repeated. Gradients are wanted unless no-grad is given.",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every implementation, also those for other devices.")
    ] = False,
    as_json: shapes.Json = False,
) -> None:
    """Say which implementation runs a call, and why it is preferred to the others.

    The options describe the call; without any it is an example call without a mask. Nothing is computed: tensors are
    described by their shapes. Exit code 1 if no implementation can run the call. --json lists every implementation.

    Example: tilewise why --seqlen-q 4096 --heads-q 32 --heads-kv 8 --mask "causal & window(1024)"
    """
    import torch

    wanted = set(extra or ())
    where = shapes.device(device)
    kind = (dtype or (shapes.Dtype.bf16 if where.type == "cuda" else shapes.Dtype.fp32)).torch
    layout = None if packed is None else shapes.packed(packed, where)
    lead_q: tuple[int, ...]
    lead_k: tuple[int, ...]
    if layout is None:
        lead_q, lead_k = (batch, seqlen_q), (batch, seqlen_k or seqlen_q)
    else:
        lead_q = lead_k = (int(layout.cu_seqlens_q[-1]),)
    heads, dims = (heads_q, heads_kv or heads_q), (head_dim, head_dim_v or head_dim)
    q, k, v = shapes.tensors(lead_q, lead_k, heads, dims, dtype=kind, device=where, grad=Extra.no_grad not in wanted)
    explanation = tilewise.why(
        q,
        k,
        v,
        mask=read_mask(mask, where),
        score=read_score(score, where),
        sink=torch.zeros(heads_q, device=where) if Extra.sink in wanted else None,
        layout=layout,
        dropout=0.1 if Extra.dropout in wanted else 0.0,
        deterministic=Extra.deterministic in wanted,
        batch_invariant=Extra.batch_invariant in wanted,
        quantize=None if quantize is None else parse_scheme(quantize),
        impl=impl,
        all=every,
    )
    if as_json:
        names = ("name", "summary", "verdict")
        say_json(
            {"chosen": explanation.chosen, "rows": [dict(zip(names, row, strict=True)) for row in explanation.rows]}
        )
    else:
        rows = [
            (">" if name == explanation.chosen else "", name, verdict.replace(f"impl={name!r}", f"--impl {name}"))
            for name, _, verdict in explanation.shown()
        ]
        of_the_call = context.params.keys() - {"device", "dtype", "impl", "every", "as_json"}
        sources = map(context.get_parameter_source, of_the_call)
        example = "" if any(source and source.name != "DEFAULT" for source in sources) else "example call: "
        title = (
            f"{example}q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, "
            f"{str(kind).removeprefix('torch.')} on {where}, mask {mask or 'none'}"
        )
        table(title, ("", "implementation", "verdict"), rows, left=3)
        if explanation.chosen is None:
            say("no implementation can run this call")
        rest = explanation.rest()
        if rest is not None:
            say(f"not listed: {rest} (--all lists every implementation)")
    if explanation.chosen is None:
        raise typer.Exit(FAILED)
