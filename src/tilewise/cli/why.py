"""`tilewise why`: which implementation a call would run on, and what keeps the others from it."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

import tilewise
from tilewise.cli import shapes
from tilewise.cli.expression import read_mask, read_score
from tilewise.cli.output import FAILED, guarded, say, say_json, table


class Extra(str, Enum):
    """Circumstances of a call beside its shape and formula."""

    sink = "sink"
    dropout = "dropout"
    deterministic = "deterministic"
    batch_invariant = "batch-invariant"
    no_grad = "no-grad"


@guarded
def why(
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
            help="Packed sequences of these lengths, such as 1024,512,7, instead of batch and seqlen.",
            rich_help_panel=shapes.SHAPE,
        ),
    ] = None,
    mask: shapes.MaskText = None,
    score: shapes.ScoreText = None,
    dtype: Annotated[shapes.Dtype | None, typer.Option(help="Default: bf16 on a GPU, fp32 on a CPU.")] = None,
    device: shapes.Device = None,
    extra: Annotated[
        list[Extra] | None,
        typer.Option("--with", help="A circumstance; may be repeated. Without no-grad, gradients are wanted."),
    ] = None,
    as_json: shapes.Json = False,
) -> None:
    """Say which implementation runs a call, and the first unmet need of every other.

    Nothing is computed: the tensors are only described. Exit code 1 if nothing can run the call.

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
    )
    if as_json:
        names = ("name", "summary", "verdict")
        say_json(
            {"chosen": explanation.chosen, "rows": [dict(zip(names, row, strict=True)) for row in explanation.rows]}
        )
    else:
        rows = [(">" if name == explanation.chosen else "", name, verdict) for name, _, verdict in explanation.rows]
        title = (
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, {str(kind).removeprefix('torch.')} on {where}"
        )
        table(title, ("", "implementation", "verdict"), rows, left=3)
        if explanation.chosen is None:
            say("nothing can run this call")
    if explanation.chosen is None:
        raise typer.Exit(FAILED)
