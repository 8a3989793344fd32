"""What several rows of attention need."""

from __future__ import annotations

import torch

from tilewise.core import dispatch
from tilewise.core.dispatch import Need
from tilewise.ops.attention.problem import Call


def _out_of_reach(call: Call, axis: int) -> str | None:
    """How far a pool's first and last along an axis are apart, where 32 bits do not count it."""
    size = max((x.shape[axis] - 1) * x.stride(axis) for x in (call.k, call.v)) if call.pages else 0
    return f"{size}" if size >= 2**31 else None


CPU: Need[Call] = dispatch.on("cpu", lambda c: c.q.device)
GPU: Need[Call] = dispatch.gpu(lambda c: c.q.device)
HALF: Need[Call] = dispatch.dtypes(lambda c: c.q.dtype, torch.float16, torch.bfloat16)
UP_TO_FLOAT32: Need[Call] = dispatch.dtypes(lambda c: c.q.dtype, torch.float16, torch.bfloat16, torch.float32)
HOPPER: Need[Call] = Need("a Hopper GPU (sm_90)", lambda c: _no_hopper(c))  # found when called: tests replace it
PAGED: Need[Call] = Need("the paged layout", lambda c: None if c.pages else "packed" if c.packed else "dense")
DENSE: Need[Call] = Need("the dense layout", lambda c: "paged" if c.pages else "packed" if c.packed else None)
NO_GRAD: Need[Call] = Need("no gradients", lambda c: "gradients wanted" if c.wants_grad else None)
NO_GRAD_OF_PAGES: Need[Call] = Need(
    "no gradients with paged keys", lambda c: "gradients wanted" if c.pages and c.wants_grad else None
)
NO_CODES: Need[Call] = Need(
    "keys and values that are not encoded", lambda c: None if c.scales is None else str(c.k.dtype)
)
SCHEME: Need[Call] = Need("quantize=", lambda c: None if c.scheme else "a call without it")
NO_DROPOUT: Need[Call] = Need("no dropout", lambda c: None if c.dropout == 0.0 else f"dropout {c.dropout}")
ATOMICS: Need[Call] = Need(
    "deterministic=False, or no gradients of captured tensors (summed by atomics)",
    lambda c: "deterministic=True and such gradients" if c.deterministic and any(c.grad_captured) else None,
)
ALL_VALUES: Need[Call] = Need("no Sparge(lam=)", lambda c: None if c.skip is None else "lam=")
NEAR_TOKENS: Need[Call] = Need(
    "pages whose first and last token are fewer than 2**31 elements apart", lambda c: _out_of_reach(c, 1)
)
NEAR_HEADS: Need[Call] = Need(
    "pages whose first and last head are fewer than 2**31 elements apart", lambda c: _out_of_reach(c, 2)
)
ANY_BATCH: Need[Call] = Need("batch_invariant=False", lambda c: "batch_invariant=True" if c.batch_invariant else None)


def _no_hopper(call: Call) -> str | None:
    if call.q.device.type != "cuda":
        return call.q.device.type
    sm = dispatch.capability(call.q.device)
    return None if sm == 90 else f"sm_{sm}"
