"""Options that several commands share, and the tensors they describe."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import torch
import typer

from tilewise.core.errors import InputError, shown
from tilewise.layouts import Packed

SHAPE = "Shape"
FORMULA = "Formula"
MACHINE = "Machine"
MOST_SEQUENCES, MOST_TOKENS = 2**16, 2**31  # of one call
MOST_DIGITS = 20  # of a length; more is a mistake, and Python reads no number of thousands


class Dtype(str, Enum):
    """Types of q, k and v."""

    fp16 = "fp16"
    bf16 = "bf16"
    fp32 = "fp32"
    fp64 = "fp64"

    @property
    def torch(self) -> torch.dtype:
        return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[self.value]


Batch = Annotated[int, typer.Option("--batch", "-b", min=1, help="Batch size.", rich_help_panel=SHAPE)]
SeqlenQ = Annotated[int, typer.Option("--seqlen-q", min=1, help="Number of queries.", rich_help_panel=SHAPE)]
SeqlenK = Annotated[
    int | None,
    typer.Option("--seqlen-k", min=1, help="Number of keys. Default: as many as queries.", rich_help_panel=SHAPE),
]
HeadsQ = Annotated[int, typer.Option("--heads-q", min=1, help="Query heads.", rich_help_panel=SHAPE)]
HeadsKV = Annotated[
    int | None,
    typer.Option(
        "--heads-kv",
        min=1,
        help="Key/value heads; must divide the query heads. Default: as many.",
        rich_help_panel=SHAPE,
    ),
]
HeadDim = Annotated[int, typer.Option("--head-dim", min=1, help="Width of q and k.", rich_help_panel=SHAPE)]
HeadDimV = Annotated[
    int | None, typer.Option("--head-dim-v", min=1, help="Width of v. Default: that of q.", rich_help_panel=SHAPE)
]
Causal = Annotated[bool, typer.Option("--causal", help="Causal mask.", rich_help_panel=FORMULA)]
MaskText = Annotated[
    str | None,
    typer.Option(
        "--mask",
        "-m",
        metavar="EXPRESSION",
        help='Mask in the library\'s names, such as "causal & window(1024)"; lists stand for tensors.',
        rich_help_panel=FORMULA,
    ),
]
ScoreText = Annotated[
    str | None,
    typer.Option(
        "--score",
        "-s",
        metavar="EXPRESSION",
        help='Score in the library\'s names, such as "softcap(30)"; join two with >>.',
        rich_help_panel=FORMULA,
    ),
]
Scale = Annotated[
    float | None, typer.Option("--scale", help="Of scores. Default: head_dim ** -0.5.", rich_help_panel=FORMULA)
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda or cuda:N. Default: a GPU if there is one.", rich_help_panel=MACHINE),
]
Impl = Annotated[
    str | None,
    typer.Option("--impl", help="Ask for one implementation by name (see tilewise why).", rich_help_panel=MACHINE),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


def device(name: str | None) -> torch.device:
    """The device called `name`, or the default; InputError where it is unknown or not there."""
    expected, hint = "cpu, cuda or cuda:N", "leave it out for the GPU, or the CPU where there is none"
    try:
        found = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise InputError("--device", got=repr(name), expected=expected, hint=hint) from error
    if found.type not in ("cpu", "cuda"):
        raise InputError("--device", got=repr(name), expected=expected, hint=hint)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        expected = f"one of {torch.cuda.device_count()} CUDA devices, or cpu"
        raise InputError("--device", got=repr(name), expected=expected, hint=hint)
    return found


def tensors(
    lead_q: tuple[int, ...],
    lead_k: tuple[int, ...],
    heads: tuple[int, int],
    dims: tuple[int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised q, k, v of (lead, heads, dim), for questions that look at shapes only."""

    def empty(lead: tuple[int, ...], heads: int, dim: int) -> torch.Tensor:
        shape = (*lead, heads, dim)
        try:
            return torch.empty(shape, dtype=dtype, device=device, requires_grad=grad)
        except (RuntimeError, TypeError, OverflowError) as error:  # beyond memory, or beyond 64 bits
            got, hint = f"{dtype} of {shown(shape)}", "the answer seldom depends on --batch: ask for fewer"
            raise InputError("shape", got=got, expected=f"a tensor that fits into {device}", hint=hint) from error

    return empty(lead_q, heads[0], dims[0]), empty(lead_k, heads[1], dims[0]), empty(lead_k, heads[1], dims[1])


def lengths(text: str, name: str) -> list[int]:
    """Lengths such as "1024,512,7", or "8*512,7" for eight of 512; InputError for anything else."""
    hint = "one length >= 0 for each sequence, commas between; 8*512 is eight times 512"
    counted: list[tuple[int, int]] = []
    for part in text.split(","):
        times, star, length = part.strip().rpartition("*")
        numbers = [length.strip(), times.strip() if star else "1"]
        if not all(x.isascii() and x.isdecimal() and len(x) < MOST_DIGITS for x in numbers):
            raise InputError(name, got=shown(text), expected="lengths such as 1024,512,7", hint=hint)
        counted.append((int(numbers[0]), int(numbers[1])))
    many, tokens = sum(n for _, n in counted), sum(length * n for length, n in counted)
    if not many:
        raise InputError(name, got=shown(text), expected="lengths such as 1024,512,7", hint=hint)
    if many > MOST_SEQUENCES or tokens >= MOST_TOKENS:
        got = f"{many} sequences of {tokens} tokens"
        expected = f"at most {MOST_SEQUENCES} sequences, and fewer than 2**31 tokens in all"
        raise InputError(name, got=got, expected=expected, hint="running sums of lengths are int32")
    return [length for length, n in counted for _ in range(n)]


def packed(text: str, device: torch.device) -> Packed:
    """`Packed` from sequence lengths (`lengths`)."""
    ends = torch.tensor([0, *lengths(text, "--packed")]).cumsum(0)
    return Packed(ends.to(device=device, dtype=torch.int32))
