"""The calls whose kernels are compiled without a GPU: rows of dispatch tables with formulas, dtypes and widths."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.attention.problem import Call, make_call
from tilewise.ops.kv_write.problem import Copy, Write, copy_calls, write_call
from tilewise.ops.merge.problem import Call as MergeCall
from tilewise.ops.merge.problem import joined_call, separate_call
from tilewise.quant import KINDS, encode, encode_by_channel
from tilewise.testing import qkv_prologue
from tilewise.testing.offline import (
    Resources,
    compile_call,
    compile_kv_write,
    compile_merge,
    compile_operation,
    compile_qkv_prologue,
)
from tools.families import NEIGHBOURS

ARCHITECTURES = (80, 90, 100)
SEQLEN, HEADS, HEADS_KV = 256, 4, 2
LEFT_OUT = 15.0  # how far below the largest scores are that count for nothing
LONG = 1536  # tokens of Hopper's variants: shorter ones have a backward of their own
LONGER = 8192  # of those whose programs meet
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _packed() -> tw.Packed:
    return tw.Packed(torch.tensor([0, 100, 100, 256], dtype=torch.int32))


FP8 = tw.Sage("fp8", smooth=("k", "v"))
CODED: dict[str, Callable[[], dict[str, Any]]] = {  # quantized
    "sage2": lambda: {"quantize": tw.Sage2()},
    "sage1": lambda: {"mask": tw.causal, "quantize": tw.Sage1()},
    "sage2 int4": lambda: {"mask": tw.causal, "quantize": tw.Sage2("int4")},
    "sage2 sums": lambda: {"quantize": tw.Sage2()},  # of weights as they are, for a gradient
    "int8 blocks": lambda: {"quantize": tw.Sage(q_scale="block", k_scale="block", v_scale="block", smooth=())},
    "sage2 causal": lambda: {"mask": tw.causal, "quantize": tw.Sage2()},
    "sage2 softcap": lambda: {"mask": tw.causal, "score": tw.softcap(30.0), "quantize": tw.Sage2()},
    "fp8 blocks": lambda: {
        "mask": tw.blocks(torch.ones(2, HEADS, *(2 * [LONG // 128]), dtype=torch.bool), 128),
        "quantize": FP8,
    },
    "fp8 value blocks": lambda: {"mask": tw.causal, "quantize": tw.FP8("block", "block", "block")},
    "sage2 packed": lambda: {"mask": tw.causal, "layout": _packed(), "quantize": tw.Sage2()},
    "fp8 scores": lambda: {"quantize": FP8},
    "fp8 longer": lambda: {"quantize": FP8},
    "fa3": lambda: {"mask": tw.causal, "quantize": tw.FP8(v_scale="channel")},
    "sage2 left out": lambda: {"mask": tw.causal, "quantize": tw.Sage2()},  # tiles of small weights
}
FORMULAS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "longer": dict,
    "causal": lambda: {"mask": tw.causal},
    "window": lambda: {"mask": tw.window(100)},
    "alibi": lambda: {"mask": tw.causal, "score": tw.alibi(torch.ones(HEADS, requires_grad=True))},
    "slopes": lambda: {"mask": tw.causal, "score": tw.alibi(torch.ones(HEADS))},
    "softcap": lambda: {"mask": tw.causal, "score": tw.softcap(30.0)},
    "document": dict,  # `OF_TOKENS`
    "document ends": dict,
    "packed": lambda: {"mask": tw.causal, "layout": _packed()},
    "dropout": lambda: {"mask": tw.causal, "dropout": 0.1, "seed": 0},
    "maps dropout": lambda: {
        "mask": tw.blocks(torch.ones(2 * [SEQLEN // 8], dtype=torch.bool), 8),
        "dropout": 0.1,
        "seed": 0,
    },  # booleans that are loaded, and words that are joined
    "repeats": lambda: {"mask": tw.causal, "deterministic": True},
    "left out": lambda: {"mask": tw.causal},  # tiles of small weights
    "pages": lambda: {"mask": tw.causal, "layout": _packed()},
    "small pages": lambda: {"mask": tw.causal, "layout": _packed()},  # which no boxes reach
    "invariant": lambda: {"mask": tw.causal, "batch_invariant": True},
    "shared": lambda: {"mask": tw.causal},  # prefixes, of requests over pages
    **dict.fromkeys(KINDS, dict),  # of pages, encoded
    "channels4": dict,  # of pages that tiles divide, beside values of 8 bits
    "channels2": dict,
    **CODED,
}
OF_TOKENS: dict[str, Callable[[int], dict[str, Any]]] = {  # formulas that know how many there are
    "document": lambda tokens: {"mask": tw.causal & tw.document(torch.arange(tokens) // 30)},
    "document ends": lambda tokens: {"mask": tw.document(torch.arange(tokens) // 30, ascending=True)},
}
PAGES, PAGE_SIZE = 64, 16
CHANNELS = {"channels4": (4, 64), "channels2": (2, PAGE_SIZE)}  # bits and page size of keys by channel
STATES: dict[str, Callable[[int, torch.dtype], MergeCall]] = {
    "pair": lambda dim, dtype: separate_call([_state((2, SEQLEN), dim, dtype)] * 2, None),
    "stacked": lambda dim, dtype: joined_call(*_state((12, 2, 4), dim, dtype), None, None),
    "ragged": lambda dim, dtype: joined_call(*_state((256,), dim, dtype), _packed().cu_seqlens_q, None),
}


def _encoded_write(kind: str, dim: int, dtype: torch.dtype) -> Write:
    tokens = [torch.zeros(SEQLEN, HEADS_KV, dim, dtype=dtype)] * 2
    return write_call(*tokens, *(encode(pages, kind) for pages in _pool(dim, dtype)), torch.arange(SEQLEN))


def _write_by_channel(kind: str, dim: int, dtype: torch.dtype) -> Write:
    tokens = [torch.zeros(SEQLEN, HEADS_KV, dim, dtype=dtype)] * 2
    bits, page_size = CHANNELS[kind]
    pages = torch.zeros(PAGES, page_size, HEADS_KV, dim, dtype=dtype)
    table, slots = torch.zeros(SEQLEN, dim // 2), torch.arange(SEQLEN)
    return write_call(
        *tokens, encode_by_channel(pages, bits), encode(pages, "int8"), slots, tw.Rope(table, table, slots)
    )


def _rotated_write(kind: str | None, dim: int, dtype: torch.dtype, interleaved: bool) -> Write:
    tokens = [torch.zeros(SEQLEN, HEADS_KV, dim, dtype=dtype)] * 2
    pages = [pages if kind is None else encode(pages, kind) for pages in _pool(dim, dtype)]
    table, slots = torch.zeros(SEQLEN, dim // 2), torch.arange(SEQLEN)
    return write_call(*tokens, *pages, slots, tw.Rope(table, table, slots, interleaved))


WRITES: dict[str, Callable[[int, torch.dtype], Write | Copy]] = {
    "tokens": lambda dim, dtype: write_call(
        *[torch.zeros(SEQLEN, HEADS_KV, dim, dtype=dtype)] * 2, *_pool(dim, dtype), torch.arange(SEQLEN)
    ),
    "pages": lambda dim, dtype: copy_calls(*_pool(dim, dtype), torch.tensor([[0, 1], [2, 3]]))[0],
    **{kind: functools.partial(_encoded_write, kind) for kind in KINDS},
    **{kind: functools.partial(_write_by_channel, kind) for kind in CHANNELS},
    "tokens halves": lambda dim, dtype: _rotated_write(None, dim, dtype, interleaved=False),
    "tokens neighbours": lambda dim, dtype: _rotated_write(None, dim, dtype, interleaved=True),
    "fp8 halves": lambda dim, dtype: _rotated_write("fp8", dim, dtype, interleaved=False),
    "int4 neighbours": lambda dim, dtype: _rotated_write("int4", dim, dtype, interleaved=True),
}


def _pool(head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Pages of keys and values."""
    return [torch.zeros(PAGES, PAGE_SIZE, HEADS_KV, head_dim, dtype=dtype) for _ in range(2)]


def _state(rows: tuple[int, ...], head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of `HEADS` heads."""
    return torch.zeros(*rows, HEADS, head_dim, dtype=dtype), torch.zeros(*rows[:-1], HEADS, rows[-1])


def _neighbour(name: str) -> dict[str, Callable[[int, torch.dtype], tuple[Any, ...]]]:
    """Its variants by name: what gives, from a width and a dtype, `compile_operation`'s operation and call, and which
    gradients where these are not those of the call's fields.
    """
    found: dict[str, Any] = importlib.import_module(f"tilewise.testing.{name}").VARIANTS
    return found


@dataclass(frozen=True)
class Variant:
    """One call to compile: `row` of attention with a formula, "merge" of states that lie so, "kv_write" of tokens or
    pages, "qkv_prologue" into pages, or another operation on rows as wide as `head_dim`. Of the `quick` ones the
    compile tier compiles a part, the tool compiles all.
    """

    sm: int
    row: str
    dtype: str
    head_dim: int
    formula: str
    quick: bool = False

    def __str__(self) -> str:
        return f"sm_{self.sm} {self.row} {self.dtype} d{self.head_dim} {self.formula}"

    def call(self) -> Call:
        arguments = FORMULAS[self.formula]()
        if self.row in ("triton_paged", "hopper_decode") or self.formula in ("pages", "small pages"):
            return self._paged(arguments)
        tokens = LONGER if self.formula.endswith("longer") else LONG
        tokens = tokens if self.row in ("hopper", "hopper_codes") else SEQLEN
        lead = (SEQLEN,) if "layout" in arguments else (2, tokens)
        if self.formula in OF_TOKENS:
            arguments = OF_TOKENS[self.formula](tokens)
        rows = (2, 4) if self.row == "triton_decode" else lead
        forward = self.row in ("triton_decode", "hopper_codes", "triton_codes") or self.formula == "left out"
        grad = not forward or self.formula == "sage2 sums"
        q = torch.zeros(*rows, HEADS, self.head_dim, dtype=DTYPES[self.dtype], requires_grad=grad)
        k, v = (torch.zeros(*lead, HEADS_KV, self.head_dim, dtype=q.dtype, requires_grad=grad) for _ in range(2))
        call = make_call(q, k, v, **arguments)
        call.skip = torch.full((HEADS,), LEFT_OUT) if self.formula.endswith("left out") else None
        return call

    def _paged(self, arguments: dict[str, Any]) -> Call:
        """Two requests of four queries, sixteen where they share prefixes, or of a packed prefill, over pages."""
        shared = self.formula == "shared"
        batch = 16 if shared else 2
        width = 4 * PAGES if self.formula == "pages" else PAGES // 2  # so long that boxes are taken
        table = torch.zeros(batch, width, dtype=torch.int32)
        seqlens = torch.tensor([100, 256], dtype=torch.int32).repeat(batch // 2)
        packed = arguments.pop("layout", None)
        layout = tw.Paged(table, seqlens, packed and packed.cu_seqlens_q[[0, 1, 3]], share_prefixes=shared)
        q = torch.zeros(*((batch, 4) if packed is None else (SEQLEN,)), HEADS, self.head_dim, dtype=DTYPES[self.dtype])
        bits, page_size = CHANNELS.get(self.formula, (0, PAGE_SIZE if self.formula != "small pages" else 8))
        pool: Any = torch.zeros(PAGES, page_size, HEADS_KV, self.head_dim, dtype=q.dtype)
        if bits:
            return make_call(q, encode_by_channel(pool, bits), encode(pool, "int8"), layout=layout, **arguments)
        if self.formula in KINDS:
            pool = encode(pool, self.formula)
        return make_call(q, pool, pool, layout=layout, **arguments)

    def launches(self) -> list[Resources]:
        """The kernels of the call in the order in which it launches them."""
        if self.row == "merge":
            return compile_merge(STATES[self.formula](self.head_dim, DTYPES[self.dtype]), self.sm)
        if self.row == "kv_write":
            return compile_kv_write(WRITES[self.formula](self.head_dim, DTYPES[self.dtype]), self.sm)
        if self.row == "qkv_prologue":
            return compile_qkv_prologue(qkv_prologue.VARIANTS[self.formula](self.head_dim, DTYPES[self.dtype]), self.sm)
        if self.row in NEIGHBOURS:
            operation, call, *backward = _neighbour(self.row)[self.formula](self.head_dim, DTYPES[self.dtype])
            return compile_operation(operation, call, self.sm, *backward)
        return compile_call(self.call(), self.sm, self.row)

    def named(self, launches: list[Resources]) -> dict[str, Resources]:
        """These by kernel name; of several launches of one kernel the last, and of two over prefixes and then over
        requests both.
        """
        found = {one.kernel: one for one in launches}
        if self.formula == "shared" and len(found) < len(launches):
            first = next(one for one in launches if one.kernel == launches[-1].kernel)
            found = {f"{first.kernel} of prefixes": first} | found
        return found


_WIDTHS = (("bf16", 4096), ("bf16", 1000), ("fp32", 4096), ("bf16", 65536))
_QUICK = {
    80: {"bf16 d64 causal", "bf16 d128 causal", "bf16 d128 softcap", "bf16 d128 document", "bf16 d128 alibi",
         "bf16 d256 causal", "bf16 d512 plain", "fp16 d64 plain", "fp32 d64 causal", "fp32 d128 alibi"},
    90: {"bf16 d64 causal", "bf16 d64 window", "bf16 d64 alibi", "bf16 d64 document", "bf16 d128 plain",
         "bf16 d128 causal", "bf16 d128 window", "bf16 d128 alibi", "bf16 d128 softcap", "bf16 d128 document",
         "bf16 d128 packed", "bf16 d128 dropout", "bf16 d256 causal", "bf16 d512 plain", "fp16 d64 plain",
         "fp32 d64 causal", "fp32 d128 alibi"},
    100: {"bf16 d64 causal", "bf16 d128 causal", "bf16 d128 softcap", "bf16 d128 document", "bf16 d128 alibi",
          "bf16 d256 causal", "bf16 d512 plain", "fp16 d64 plain", "fp32 d64 causal", "fp32 d128 alibi"},
}  # fmt: skip


def variants() -> Iterator[Variant]:
    """Every variant: each configuration row of each kernel is reached by several."""
    for sm, head_dim in itertools.product(ARCHITECTURES, (64, 128, 256, 512)):
        portable = tuple(
            formula
            for formula in FORMULAS
            if formula
            not in (
                "longer",
                "slopes",
                "document ends",
                "maps dropout",
                "repeats",
                "pages",
                "small pages",
                "invariant",
                "shared",
                *KINDS,
                *CHANNELS,
                *CODED,
            )
        )  # kernels of others
        by_dtype = {"bf16": portable, "fp16": ("plain",), "fp32": ("causal", "alibi")}
        for dtype, formulas in by_dtype.items():
            for formula in formulas:
                quick = f"{dtype} d{head_dim} {formula}" in _QUICK[sm]
                yield Variant(sm, "triton", dtype, head_dim, formula, quick)
        if head_dim == 512:
            yield Variant(sm, "triton", "bf16", head_dim, "maps dropout", True)
        for dtype, formula in (("bf16", "causal"), ("bf16", "alibi"), ("fp32", "causal")):
            quick = head_dim == 128 and formula == "causal"
            yield Variant(sm, "triton_decode", dtype, head_dim, formula, quick)
        for formula in ("plain", "window", "packed", "causal", "invariant", "shared"):
            dtype = "fp32" if formula == "causal" else "bf16"
            quick = head_dim == 128 and (
                formula == "plain" or (formula in ("packed", "invariant", "shared") and sm == 90)
            )
            yield Variant(sm, "triton_paged", dtype, head_dim, formula, quick)
        for dtype, kind in (("bf16", "int8"), ("bf16", "fp8"), ("bf16", "int4"), ("fp16", "int8")):
            if head_dim in (64, 128, 256):
                yield Variant(sm, "triton_paged", dtype, head_dim, kind, head_dim == 128 and dtype == "bf16")
        for dtype, kind in (("bf16", "channels4"), ("bf16", "channels2"), ("fp16", "channels2")):
            if head_dim in (64, 128, 256):
                yield Variant(sm, "triton_paged", dtype, head_dim, kind, head_dim == 128 and dtype == "bf16")
    for sm, states in itertools.product(ARCHITECTURES, STATES):
        for dtype, head_dim in (("bf16", 128), ("bf16", 40), ("bf16", 512), ("fp32", 128)):
            yield Variant(sm, "merge", dtype, head_dim, states, head_dim == 128)
    for sm, moved in itertools.product(ARCHITECTURES, WRITES):
        for dtype, head_dim in (("bf16", 128), ("bf16", 40), ("fp32", 128)):
            yield Variant(sm, "kv_write", dtype, head_dim, moved, head_dim == 128)
    for sm, kind in itertools.product(ARCHITECTURES, qkv_prologue.VARIANTS):
        for dtype, head_dim in (("bf16", 128), ("bf16", 40), ("fp32", 128)):
            yield Variant(sm, "qkv_prologue", dtype, head_dim, kind, head_dim == 128)
    for sm, name in itertools.product(ARCHITECTURES, NEIGHBOURS):
        for formula, (dtype, width) in itertools.product(_neighbour(name), _WIDTHS):
            yield Variant(sm, name, dtype, width, formula, sm == 90 and (dtype, width) == _WIDTHS[0])
    for head_dim in (64, 128, 256):
        for formula in (
            "plain",
            "longer",
            "causal",
            "window",
            "slopes",
            "softcap",
            "document",
            "document ends",
            "packed",
            "dropout",
            "repeats",
            "left out",
            "pages",
            "small pages",
        ):
            quick = head_dim == 128 or formula == "causal"
            yield Variant(90, "hopper", "bf16", head_dim, formula, quick)
        for dtype, formula in (("bf16", "plain"), ("bf16", "softcap"), ("bf16", "packed"), ("fp16", "window"),
                               ("bf16", "shared")):  # fmt: skip
            quick = head_dim == 128 and formula in ("plain", "packed", "shared")
            yield Variant(90, "hopper_decode", dtype, head_dim, formula, quick)
        for kind in KINDS:
            yield Variant(90, "hopper_decode", "bf16", head_dim, kind, head_dim == 128)
        yield Variant(90, "hopper_mixed", "bf16", head_dim, "pages", head_dim == 128)
    for head_dim in (64, 128, 256):
        for formula in (formula for formula in CODED if formula not in ("sage1", "sage2 int4")):
            quick = head_dim == 128 or (head_dim == 256 and formula in ("sage2 packed", "fp8 blocks"))
            yield Variant(90, "hopper_codes", "bf16", head_dim, formula, quick)
    for sm, head_dim in itertools.product(ARCHITECTURES, (64, 128, 256)):
        for formula in (
            formula for formula in CODED if formula not in ("sage2 sums", "int8 blocks", "fp8 blocks", "fp8 longer")
        ):
            yield Variant(sm, "triton_codes", "bf16", head_dim, formula, head_dim == 128 and formula == "sage2 causal")
