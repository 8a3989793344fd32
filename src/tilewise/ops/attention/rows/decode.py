"""The row of the kernel for few queries over pages on Hopper."""

from __future__ import annotations

import torch

from tilewise.core.dispatch import TRITON, Need, Row, untraced
from tilewise.formula.structure import parse
from tilewise.formula.walk import symbols
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.rows.needs import ALL_VALUES, ANY_BATCH, HALF, HOPPER, NEAR_TOKENS, NO_DROPOUT, NO_GRAD
from tilewise.ops.attention.sharing import may_share
from tilewise.quant.codes import KINDS


def _other_dims(call: Call) -> str | None:
    dims = (call.head_dim, call.head_dim_v)
    step = 32 if call.scales is not None and call.k.dtype == KINDS["int4"].dtype else 16
    return None if all(32 < d <= 256 and d % step == 0 for d in dims) else f"{dims[0]}, {dims[1]}"


def _half_and_codes(call: Call) -> str | None:
    """Queries beside codes are several bytes each (`tiles.gluon_codes`), which have fewer bits than float16 has."""
    return "torch.float16" if call.scales is not None and call.q.dtype == torch.float16 else None


def _shared_codes(call: Call) -> str | None:
    return "share_prefixes=True and codes" if call.scales is not None and may_share(call) else None


def _rows_apart(call: Call) -> str | None:
    """A stride that copies of 16 bytes cannot follow."""
    strides = [x.stride(n) for x in (call.q, call.k, call.v) for n in range(x.ndim - 1)]
    return next((f"a stride of {stride}" for stride in strides if stride % 16), None)


@untraced
def _reads_scores(text: str) -> bool:
    return "s" in symbols(parse(text).root)


def _other_scores(call: Call) -> str | None:
    """Device functions of such a score spread it over a tile, for which they would have to know the tile's layout."""
    return None if call.score is None or _reads_scores(call.score.text) else "a score of positions alone"


ROW: Row[Call] = Row(
    "hopper_decode",
    "tilewise.ops.attention.gluon_decode",
    (
        TRITON,
        HOPPER,
        HALF,
        Need("the dense or the paged layout", lambda c: "packed" if c.packed and not c.pages else None),
        Need("head dimensions of 48 to 256, multiples of 16 (of int4: of 32)", _other_dims),
        Need("bfloat16 queries where keys and values are encoded", _half_and_codes),
        Need("keys that are not encoded by channel", lambda c: "by channel" if c.keys_by_channel else None),
        Need("share_prefixes=False where keys and values are encoded", _shared_codes),
        Need("strides of q, k and v in multiples of 16 elements", _rows_apart),
        NEAR_TOKENS,
        Need("no score formula, or one that reads the score", _other_scores),
        NO_DROPOUT,
        ALL_VALUES,
        NO_GRAD,
        ANY_BATCH,
    ),
    "split-KV decode for Hopper, dense and paged: swap-AB products, work divided evenly among programs",
    plan="plan",
)
