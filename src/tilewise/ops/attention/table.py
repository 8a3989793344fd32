"""Who can compute attention: one row an implementation, with what each needs. Order is preference."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.errors import InputError, UnsupportedError
from tilewise.core.readback import being_traced
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.variant import CAUSAL, is_band
from tilewise.schedule.rule import tile_rule


@dataclass(frozen=True)
class Need:
    """One requirement: its wording, and a test that returns what was found instead (None when met)."""

    says: str
    unmet: Callable[[Call], str | None]


@dataclass(frozen=True)
class Row:
    """An implementation: where it lives, what it needs, and what a call that names none must be like to get it."""

    name: str
    module: str
    forward: str
    backward: str | None
    needs: tuple[Need, ...]
    summary: str
    prefers: tuple[Need, ...] = ()

    def first_unmet(self, call: Call) -> str | None:
        """None if this row can run the call, else the first need that fails and what was found."""
        return _first(self.needs, call, "needs")

    def deferred(self, call: Call) -> str | None:
        """None if the row takes such calls unasked, else the first preference that fails and what was found."""
        return _first(self.prefers, call, "prefers")

    def function(self, name: str) -> Callable[..., Any]:
        return _function(self.module, name)


def _first(needs: tuple[Need, ...], call: Call, verb: str) -> str | None:
    for need in needs:
        got = need.unmet(call)
        if got is not None:
            return f"{verb} {need.says}; got {got}"
    return None


@functools.lru_cache(maxsize=64)
def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _device(kind: str) -> Need:
    return Need(f"tensors on {kind}", lambda c: None if c.q.device.type == kind else c.q.device.type)


def _dtypes(*allowed: torch.dtype) -> Need:
    names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
    return Need(f"dtype {names}", lambda c: None if c.q.dtype in allowed else str(c.q.dtype))


def _plain_or_causal(call: Call) -> str | None:
    if call.score is not None:
        return "a score formula"
    if call.mask is None:
        return None
    if call.mask.text != CAUSAL:
        return "a mask other than causal"
    return None if call.rows_q == call.rows_k else f"causal with seqlen_q {call.rows_q}, seqlen_k {call.rows_k}"


def _few_queries(call: Call) -> str | None:
    rows = call.rows_q * call.group
    return None if rows <= 64 else f"{rows} (seqlen_q {call.rows_q} times group {call.group})"


def _other_pages(call: Call) -> str | None:
    """What of a paged call boxes of the tensor memory accelerator cannot fetch; None for all others."""
    if call.pages is None:
        return None
    size = call.k.shape[1]
    if size not in (16, 32, 64) and size % 128:
        return f"pages of {size}"
    if min(call.head_dim, call.head_dim_v) <= 32:
        return f"head dimensions {call.head_dim}, {call.head_dim_v}"
    return None if call.mask is None or _is_run(call.mask.text) else "another mask"


def _is_run(text: str) -> bool:
    return tile_rule(text).spans is not None


def _few_rows(call: Call) -> str | None:
    """Rows of the mean request that share a head's keys, where they are so few that keys should be divided."""
    if call.pages is None:
        return None
    rows = call.rows_q * call.group // (max(call.batch, 1) if call.packed else 1)
    return None if rows > 64 else f"{rows}"


def _find_triton() -> str | None:
    try:
        return None if importlib.util.find_spec("triton") else "no package named triton"
    except (ImportError, ValueError) as error:
        return str(error)


_QUERIES = 128  # of a tile
_TILES = 128  # about as many as a Hopper GPU has multiprocessors


def _few_tiles(call: Call) -> str | None:
    """Tiles of 128 queries leave more of the GPU idle than those of 64."""
    sequences = call.batch if not call.packed else 1
    tiles = -(-call.rows_q // _QUERIES) * sequences * call.num_heads_q
    return None if tiles >= _TILES else f"{tiles}"


def _narrow_window(call: Call) -> str | None:
    windowed = call.mask is not None and _is_window(call.mask.text)
    return f"{call.head_dim} and a window" if windowed and call.head_dim <= 64 else None


def _is_window(text: str) -> bool:
    return is_band(text)


# looked up without importing it, and once: torch.compile traces through the choice of a row
_TRITON_MISSING = _find_triton()
_TRITON = Need("Triton installed", lambda c: _TRITON_MISSING)
_GPU = Need("an NVIDIA GPU (sm_80 or newer) or Triton's interpreter", lambda c: _no_gpu(c))


def _no_gpu(call: Call) -> str | None:
    if call.q.device.type == "cuda":
        sm = capability(call.q.device)
        return None if sm >= 80 else f"sm_{sm}"
    return None if interpreting() else call.q.device.type


def _no_hopper(call: Call) -> str | None:
    if call.q.device.type != "cuda":
        return call.q.device.type
    sm = capability(call.q.device)
    return None if sm == 90 else f"sm_{sm}"


def capability(device: torch.device) -> int:
    """Compute capability of a CUDA device: 80, 90, 100, ...; 80 stands for the interpreter."""
    return 80 if device.type != "cuda" else _capability(device.index or 0)


_CAPABILITIES: dict[int, int] = {}


def _capability(index: int) -> int:
    if index not in _CAPABILITIES:
        major, minor = torch.cuda.get_device_capability(index)
        _CAPABILITIES[index] = 10 * major + minor
    return _CAPABILITIES[index]


# What torch.compiler.assume_constant_result sets; calling that would import Dynamo, and with it Triton, here.
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_window._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_run._dynamo_marked_constant = True  # type: ignore[attr-defined]


def interpreting() -> bool:
    """Whether Triton runs its kernels in the interpreter (TRITON_INTERPRET=1), where CPU tensors are fine."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_HALF = (torch.float16, torch.bfloat16)
_DENSE = Need("the dense layout", lambda c: "paged" if c.pages else "packed" if c.packed else None)
_NOT_PAGED = Need("keys that are not paged", lambda c: "paged" if c.pages else None)
_NO_GRAD_OF_PAGES = Need(
    "no gradient wanted of paged keys", lambda c: "one wanted" if c.pages and c.wants_grad else None
)
_NO_GRAD = Need("no gradient wanted", lambda c: "a gradient wanted" if c.wants_grad else None)
_NO_DROPOUT = Need("no dropout", lambda c: None if c.dropout == 0.0 else f"dropout {c.dropout}")
_ATOMICS = Need(
    "deterministic=False, or no captured tensor that takes a gradient (atomics)",
    lambda c: "deterministic=True" if c.deterministic and any(c.grad_captured) else None,
)
_NAMED = Need("to be named", lambda c: "no name")
_PAGES_OF_HOPPER = "keys in rows, or in pages of 16, 32, 64 or a multiple of 128 tokens under a mask of one run"
_HERE = "tilewise.ops.attention"

ROWS: tuple[Row, ...] = (
    Row(
        "cpu_sdpa",
        f"{_HERE}.cpu",
        "sdpa_forward",
        "sdpa_backward",
        (
            _device("cpu"),
            _DENSE,
            Need("no sink", lambda c: None if c.sink is None else "a sink"),
            _NO_DROPOUT,
            Need("no mask, or causal on a square, and no score formula", _plain_or_causal),
            Need(
                "head_dim_v equal to head_dim",
                lambda c: None if c.head_dim == c.head_dim_v else f"{c.head_dim}, {c.head_dim_v}",
            ),
            # its vectorised maximum loses NaN in rows shorter than a vector
            Need("seqlen_k of 16 or more", lambda c: None if c.rows_k >= 16 else f"{c.rows_k}"),
        ),
        "PyTorch's fused CPU kernel",
    ),
    Row(
        "cpu_tiled",
        f"{_HERE}.cpu",
        "tiled_forward",
        "tiled_backward",
        (_device("cpu"), _NO_GRAD_OF_PAGES),
        "tiled online softmax in PyTorch",
    ),
    Row(
        "triton_decode",
        f"{_HERE}.triton_decode",
        "forward",
        None,
        (
            _TRITON,
            _GPU,
            _dtypes(*_HALF, torch.float32),
            _DENSE,
            Need("at most 64 rows of queries for each key/value head", _few_queries),
            _NO_DROPOUT,
            _NO_GRAD,
        ),
        "keys split over the GPU, partial results merged by log-sum-exp",
    ),
    Row(
        "hopper",
        f"{_HERE}.gluon_attention",
        "forward",
        "backward",
        (
            _TRITON,
            Need(_PAGES_OF_HOPPER, _other_pages),
            _NO_GRAD_OF_PAGES,
            Need("a Hopper GPU (sm_90)", lambda c: _no_hopper(c)),
            _dtypes(*_HALF),
            Need(
                "head dimensions up to 256",
                lambda c: None if max(c.head_dim, c.head_dim_v) <= 256 else f"{c.head_dim}, {c.head_dim_v}",
            ),
            _ATOMICS,
        ),
        "warp-specialised kernels for Hopper",
        # where it was slower than the portable kernels (benchmarks/NOTES.md)
        prefers=(
            Need(f"{_TILES} tiles of {_QUERIES} queries or more", _few_tiles),
            Need("head dimensions above 64 for masks that are windows", _narrow_window),
            Need("more than 64 rows of queries for each key/value head of a paged request", _few_rows),
            Need("no gradients of captured tensors", lambda c: "some wanted" if any(c.grad_captured) else None),
        ),
    ),
    Row(
        "triton",
        f"{_HERE}.triton_attention",
        "forward",
        "backward",
        (
            _TRITON,
            _NOT_PAGED,
            _GPU,
            _dtypes(*_HALF, torch.float32),
            _ATOMICS,
        ),
        "portable tiled kernels, forward and backward",
    ),
    Row(
        "triton_paged",
        f"{_HERE}.triton_paged",
        "forward",
        None,
        (
            _TRITON,
            _GPU,
            _dtypes(*_HALF, torch.float32),
            Need("paged keys", lambda c: None if c.pages else "keys that are not paged"),
            _NO_DROPOUT,
            _NO_GRAD,
        ),
        "all requests' tiles divided evenly among programs, gathered through the block table",
    ),
    Row(
        "reference",
        f"{_HERE}.reference",
        "forward",
        "backward",
        (Need("no gradient inside torch.compile", lambda c: "one" if c.wants_grad and being_traced() else None),),
        "float64, every score materialised: the specification",
        prefers=(_NAMED,),
    ),
)


def choose(call: Call, impl: str | None) -> Row:
    """The row that runs a call: the named one, or the first whose needs all hold; raises UnsupportedError."""
    if call.signature is None:
        return _choose(call, impl)
    key = (
        call.signature, impl, call.sink is None, call.dropout == 0.0, call.deterministic, call.wants_grad,
        call.grad_captured, call.q.device.type != "cuda" and interpreting(),
    )  # fmt: skip
    row = _chosen.get(key)
    if row is None:
        row = _choose(call, impl)
        if len(_chosen) > 4096:
            _chosen.clear()
        _chosen[key] = row
    return row


_chosen: dict[tuple[Any, ...], Row] = {}  # by everything that a need may look at


def named(impl: str) -> Row:
    """The row of this name; raises InputError."""
    row = next((row for row in ROWS if row.name == impl), None)
    if row is None:
        names = ", ".join(row.name for row in ROWS)
        raise InputError(
            "impl", got=repr(impl), expected=f"None or one of {names}", hint="None takes the first that can"
        )
    return row


def _choose(call: Call, impl: str | None) -> Row:
    if impl is not None:
        row = named(impl)
        unmet = row.first_unmet(call)
        if unmet is not None:
            raise UnsupportedError(
                f"impl={impl!r}",
                got="this call",
                expected=f"what it can run: it {unmet}",
                hint="tilewise.why(...) lists all",
            )
        return row
    for row in ROWS:
        if row.first_unmet(call) is None and row.deferred(call) is None:
            return row
    reasons = "; ".join(f"{row.name} {row.first_unmet(call) or row.deferred(call)}" for row in ROWS)
    raise UnsupportedError(
        "attention", got="no implementation for this call", expected=reasons, hint="impl='reference' runs anything"
    )
