"""Codes on a GPU: a program has a block of rows of one head.

Where a mean spans a sequence, a kernel before has sums of chunks of rows, in float64 (of long sequences' keys, of some
rows), and with them least and largest numbers where scales span it, too, and a second one puts them together; how large
the numbers of a channel are at most, if nothing is taken off them, its programs find in one place. The scale of a whole
head of queries or keys needs what its blocks have at most, by the kernel that encodes, which then writes no more. The
rotation is a product with signs, which numbers of 16 bits take as they are, and float32 in two parts that tensor cores
of 10 bits do not change; the mean is rotated, too, and taken off behind. Whatever is multiplied by a stride is 64 bits
wide.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from tilewise.core.dispatch import capability
from tilewise.ops.quantize.problem import NUMBERS, Call, of_values
from tilewise.ops.quantize.triton_code_bytes import bytes_of, scale_of
from tilewise.ops.quantize.triton_columns import encode_columns
from tilewise.ops.quantize.triton_row_sums import store_sums
from tilewise.ops.quantize.triton_statistics import (
    join_chunks,
    place_of,
    program_of,
    rows_given,
    size_of,
    sum_chunks,
)
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.quant.blocks import rows_of_block
from tilewise.quant.rotation import matrix
from tilewise.quant.schemes import SAMPLED_FROM, SAMPLED_OF
from tilewise.tiles.early import begin_early, early_for, end_early

_CHUNK = 256  # rows of a program that looks at them
_SAMPLES = 4  # or of how many of these it looks at some (`quant.blocks.keys_of_mean`)
_STEP = 64  # of them at a time
_STAGES = 3  # steps whose rows are on their way
_PARTS = 16  # sums, or largest numbers of blocks, put together at a time
_EACH = 64  # elements of a thread
# columns of a product's step, and where registers are few: of float32, in two parts, or wide heads
_ROTATED = (128, 16)
TF32 = tl.constexpr(-8192)  # the bits that tensor cores keep of float32
_ROUND_TWICE = {"enable_fp_fusion": False}  # a product, and then its sum with what makes it whole, as the CPU does
_PLANS = Plans()


# device functions ----------------------------------------------------------------------------------------------------


@triton.jit
def size_of_rows(x, inside, HALVINGS: tl.constexpr):
    """How large the numbers of rows are at most, 0 of those that are not there; neighbours are compared first, so often
    as a thread has them  # [ROWS, COLS], [ROWS]
    """
    x = tl.abs(x)
    for _ in tl.static_range(HALVINGS):
        a, b = x.reshape(x.shape[0], x.shape[1] // 2, 2).split()
        x = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(inside, tl.max(size_of(x), 1), 0.0)


@triton.jit
def rotated_means(mean, turn, before, STEP: tl.constexpr):
    """`before` and the rotation of some columns' means, in three parts that tensor cores of 10 bits take as they are
    # [16, COLS]
    """
    high = (mean.to(tl.int32, bitcast=True) & TF32).to(tl.float32, bitcast=True)
    middle = ((mean - high).to(tl.int32, bitcast=True) & TF32).to(tl.float32, bitcast=True)
    part = tl.arange(0, 16)[:, None]
    parts = tl.where(part == 0, high[None, :], tl.where(part == 1, middle[None, :], (mean - high - middle)[None, :]))
    return tl.dot(tl.where(part < 3, parts, 0.0), turn.to(tl.float32), before, input_precision="tf32")


@triton.jit
def largest_of_groups(size, SHARED: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr):
    """([GROUPS], for each row that of its group [ROWS]) of the largest of rows (as `quant.blocks.row_groups`)"""
    if SHARED == "token":
        by_group = size
        by_row = size
    elif SHARED == "thread" and QUERIES:
        pairs = tl.max(size.reshape(ROWS // 16, 2, 8), 1)
        by_row = tl.broadcast_to(pairs[:, None, :], ROWS // 16, 2, 8).reshape(ROWS)
        by_group = pairs.reshape(ROWS // 2)
    elif SHARED == "thread":
        by_group = tl.max(tl.max(size.reshape(ROWS // 8, 4, 2), 2), 0)
        by_row = tl.broadcast_to(by_group[None, :, None], ROWS // 8, 4, 2).reshape(ROWS)
    elif SHARED == "warp":
        by_group = tl.max(size.reshape(ROWS // 16, 16), 1)
        by_row = tl.broadcast_to(by_group[:, None], ROWS // 16, 16).reshape(ROWS)
    else:
        by_group = tl.max(size, 0) + tl.zeros([1], tl.float32)
        by_row = tl.broadcast_to(by_group, ROWS)
    return by_group, by_row


@triton.jit
def most_of_blocks(MOST, first, blocks, PARTS: tl.constexpr):
    """The largest number of a sequence's head, of those of its blocks  # [1]"""
    most = tl.zeros([PARTS], tl.float32)
    for start in range(0, blocks, PARTS):
        part = start + tl.arange(0, PARTS)
        most = tl.maximum(most, tl.load(MOST + first + part, mask=part < blocks, other=0.0))
    return tl.max(most, 0) + tl.zeros([1], tl.float32)


# kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["batch", "seqlen", "total", "blocks"])
def encode_rows(
    X, CU, ROPE, ROTATION, MEAN, TURNED, OTHER, MOST, CODES, SCALE, BIAS, SUM, UNIT_SUM, stride_b, stride_t, stride_h,
    batch, seqlen, total, blocks,
    HEADS: tl.constexpr, HEADS_K: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, SMOOTH: tl.constexpr,
    SHARED: tl.constexpr, ENCODING: tl.constexpr, CODE: tl.constexpr, CONVERTS: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr, TURNS: tl.constexpr, EARLY: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """Codes of a block of queries or keys, or centred values; with MOST and no CODES, the block's largest number."""
    begin_early(EARLY)
    # who am I
    program = program_of(BACK)
    h = program % HEADS
    b, block, first, length, cell = place_of(program // HEADS, h, CU, batch, seqlen, blocks, HEADS, ROWS)
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < length
    x_rows = (X + b * stride_b + h.to(tl.int64) * stride_h) + ((first + row) * stride_t)[:, None]
    token = first + row if CU is not None else b * seqlen + row
    columns = tl.arange(0, BLOCK_D)

    # centred and rotated, some columns at a time where they are rotated
    HALF: tl.constexpr = X.dtype.element_ty.primitive_bitwidth == 16
    y = tl.zeros([ROWS, BLOCK_D], tl.float32)
    centre = tl.zeros([16, BLOCK_D], tl.float32)
    bias = tl.zeros([ROWS], tl.float32)
    for start in range(0, BLOCK_D, STEP):
        d = start + tl.arange(0, STEP)
        there = inside[:, None] & (d < DIM)[None, :]
        given = rows_given(x_rows, token, d, inside, there, ROPE, STEP, TURNS)
        x = given.to(tl.float32)
        if SUM is not None:
            store_sums(SUM, UNIT_SUM, cell, given, x, d, DIM)
        if SMOOTH:
            if QUERIES:
                count = tl.maximum(tl.minimum(length - block * ROWS, ROWS), 1)
                mean = (tl.sum(x.to(tl.float64), 0) / count).to(tl.float32).to(X.dtype.element_ty)
                tl.store(MEAN + cell * DIM + d, mean, mask=d < DIM)
            else:
                mean = tl.load(MEAN + (b * HEADS + h) * DIM + d, mask=d < DIM, other=0.0)
            mean = mean.to(tl.float32)
            x -= mean[None, :]
        if BIAS is not None:
            other = tl.load(OTHER + (b * HEADS_K + h // (HEADS // HEADS_K)) * DIM + d, mask=d < DIM, other=0.0)
            bias += tl.sum(x * other[None, :], 1)
        if ROTATION is None:
            y = x
        elif HALF:
            at = ROTATION + (d * DIM)[:, None] + columns[None, :]
            turn = tl.load(at, mask=(d < DIM)[:, None] & (columns < DIM)[None, :], other=0.0)
            y = tl.dot(given, turn, y)
            if SMOOTH and QUERIES:
                centre = rotated_means(mean, turn, centre, STEP)
        else:
            high = (x.to(tl.int32, bitcast=True) & TF32).to(tl.float32, bitcast=True)
            both = tl.join(high, x - high).reshape(ROWS, 2 * STEP)  # side by side, so rows of signs come twice
            twice = start + tl.arange(0, 2 * STEP) // 2
            at = ROTATION + (twice * DIM)[:, None] + columns[None, :]
            turn = tl.load(at, mask=(twice < DIM)[:, None] & (columns < DIM)[None, :], other=0.0)
            y = tl.dot(both, turn, y, input_precision="tf32")
    if ROTATION is not None:
        if HALF and SMOOTH:
            if QUERIES:
                mean_turned = tl.sum(centre, 0)
            else:
                mean_turned = tl.load(TURNED + (b * HEADS + h) * DIM + columns, mask=columns < DIM, other=0.0)
            y -= mean_turned[None, :]
        y *= DIM**-0.5

    # epilogue
    HALVINGS: tl.constexpr = 3 if ROTATION is None else 0
    if CODES is None:
        tl.store(MOST + cell, tl.max(size_of_rows(y, inside, HALVINGS), 0))
    else:
        if CU is None:
            first = b * seqlen
            bias_row = (b * HEADS + h) * seqlen
        else:
            bias_row = first + h.to(tl.int64) * total
        if BIAS is not None:
            tl.store(BIAS + bias_row + row, bias, mask=inside)
        codes = CODES + (((first + row) * HEADS + h) * DIM)[:, None] + columns[None, :]
        used = inside[:, None] & (columns < DIM)[None, :]
        if ENCODING is None:
            tl.store(codes, y.to(CODES.dtype.element_ty), mask=used)
        else:
            if SHARED == "head":
                by_group = most_of_blocks(MOST, cell - block, tl.cdiv(length, ROWS), PARTS)
                by_row = tl.broadcast_to(by_group, ROWS)
            else:
                by_group, by_row = largest_of_groups(size_of_rows(y, inside, HALVINGS), SHARED, QUERIES, ROWS)
            GROUPS: tl.constexpr = by_group.shape[0]
            # a slot that no block has gets 0, though its head may have more
            scale = tl.where(block * ROWS < length, scale_of(by_group, CODE), 0.0)
            tl.store(SCALE + cell * GROUPS + tl.arange(0, GROUPS), scale)
            tl.store(codes, bytes_of(y, scale_of(by_row, CODE), ENCODING, CONVERTS), mask=used)
    end_early(EARLY)


# launches ------------------------------------------------------------------------------------------------------------


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results. Where values come along, between a kernel that looks at them or at keys and who needs its
    outcome there is one of the other side, a long one if it can be, so that others run where one would wait.
    """
    beside = call.beside
    with on_device(call.x):
        keys = _Work(call, results)
        if beside is None:
            keys.look()
            keys.join()
            keys.make_codes()
            return
        values = _Work(beside, of_values(results))
        keys.look(values.zeros)
        if values.zeros is not None:  # whose rows L2 still has in part
            values.look()
            keys.join()
            values.make_codes()
            keys.make_codes()
            return
        keys.join()
        if values.plans.sums is None:
            values.make_codes()
            keys.make_codes()
        else:
            values.look()
            keys.make_codes()
            values.join()
            values.make_codes()


class _Work:
    """A call with its plans, and memory for what its kernels tell each other."""

    def __init__(self, call: Call, results: dict[str, torch.Tensor]) -> None:
        self.call, self.results, self.rope = call, results, None
        if call.cos is not None:
            self.rope = (call.cos, call.sin, call.positions, call.cos.stride(0), call.sin.stride(0))
        tensors = (call.x, call.cu_seqlens, call.other, call.cos, call.sin, call.positions)
        key = tensors_key(*(x for x in tensors if x is not None))  # of which results follow, new and so aligned
        facts = (call.cu_seqlens is None, call.side, call.kind, call.shared, call.largest, call.smooth, call.rotate)
        facts += (call.sums, call.cos is None, call.interleaved, call.behind, call.apart, _zeros_wanted(call))
        key = None if key is None else (key, facts)
        plans = _PLANS.get(key)
        self.plans = plans if plans is not None else _PLANS.put(key, _Plans(call))
        self.memory = {
            name: torch.empty(n, dtype=torch.float64 if name == "sums" else torch.float32, device=call.x.device)
            for name, n in self.plans.memory.items()
        }
        self.rotation = _signs(call.dim, call.x.device, call.x.dtype) if call.rotate else None

    @property
    def zeros(self) -> torch.Tensor | None:
        """What must be 0 before this looks, as int32."""
        return self.results["most"].view(torch.int32) if _sizes_wanted(self.call) else None

    def look(self, zeros_of_others: torch.Tensor | None = None) -> None:
        """Finds what spans a sequence, of means chunk by chunk."""
        call, plans, most = self.call, self.plans, self.zeros
        if plans.sums is None:
            return
        if most is not None and not call.apart:
            most.zero_()
        found = (self.memory.get("sums"), self.memory.get("spans"), most, zeros_of_others)
        plans.sums.launch((call.x, call.cu_seqlens, self.rope, *found), ())

    def join(self) -> None:
        """What chunks come to."""
        if self.plans.join is None:
            return
        turned, results = self.memory.get("turned"), self.results
        rotation = None if turned is None else self.rotation
        found = (self.memory.get("sums"), self.memory.get("spans"))
        pointers = (*found, rotation, results["mean"], turned, results.get("most"), self.call.cu_seqlens)
        self.plans.join.launch(pointers, ())

    def make_codes(self) -> None:
        call, plans, results = self.call, self.plans, self.results
        codes, scale, mean, bias = (results.get(name) for name in ("codes", "scale", "mean", "bias"))
        codes = codes if call.kind in NUMBERS or codes is None else codes.view(torch.uint8)
        if call.columns:
            plans.codes.launch((call.x, call.cu_seqlens, mean, results.get("most"), codes, scale), ())
            return
        given = (call.x, call.cu_seqlens, self.rope, self.rotation, mean, self.memory.get("turned"))
        most = self.memory.get("most")
        if plans.most is not None:
            plans.most.launch((*given, None, most, None, None, None, None, None), ())
        sums = (results.get("sum"), results.get("unit_sum"))
        plans.codes.launch((*given, call.other, most, codes, scale, bias, *sums), ())


def _sizes_wanted(call: Call) -> bool:
    """Whether who looks finds how large channels are."""
    return call.spanned and not call.smooth


def _zeros_wanted(call: Call) -> int:
    """For how many channels of values that come along."""
    beside = call.beside
    return beside.dim if beside is not None and _sizes_wanted(beside) else 0


class _Plans:
    """Plans of one kind of call: for what spans a sequence `sums`, and of means `join`; `most` of blocks; `codes`; and
    how many numbers they leave each other in `memory`.
    """

    def __init__(self, call: Call) -> None:
        self.rows = rows_of_block(call.side)
        self.block_d, self.strides = _block_of(call.dim), _strides(call.x)
        self.sums, self.join, self.most = None, None, None
        self.memory: dict[str, int] = {}
        self.cells = self._programs(call, self.rows)
        early, looks = early_for(call.x.device, call.behind), call.spanned or call.summed
        if looks:
            self._chunks(call)
            early = early_for(call.x.device, call.apart and not (call.summed and call.side == "v"))
        make = self._columns if call.columns else self._rows
        if call.of_head:
            self.most, self.memory["most"] = make(call, looks, early), self.cells
            early = early_for(call.x.device)
        self.codes = make(call, looks != call.of_head, early)

    def _programs(self, call: Call, rows: int) -> int:
        """Blocks of so many rows, of all sequences and heads."""
        return call.slots(rows) * call.heads * (call.batch if call.cu_seqlens is None else 1)

    def _sizes(self, call: Call, rows: int) -> tuple[int, int, int]:
        return call.batch, call.x.shape[-3], call.slots(rows)

    def _chunks(self, call: Call) -> None:
        sampled = call.summed and call.side == "k"
        chunk, per = (SAMPLED_OF, 1) if sampled else (_CHUNK, 1)
        if sampled and call.cu_seqlens is None and call.x.shape[1] >= SAMPLED_FROM:
            per = _SAMPLES
        programs, by_head = self._programs(call, per * chunk), call.batch * call.heads
        if call.summed:
            self.memory["sums"] = programs * call.dim
            if call.spanned:
                self.memory["spans"] = 2 * programs * call.dim
        turned = call.summed and call.rotate and call.x.dtype != torch.float32
        if turned:
            self.memory["turned"] = by_head * call.dim
        # where rows are turned, angles and the other numbers of pairs want registers, too
        step, stages = (_STEP, _STAGES) if call.cos is None else (_STEP // 2, 1)
        warps = max(1, _STEP * self.block_d // (32 * _EACH))
        at_once = min(step, max(1, 32 * warps * 16 // (call.x.element_size() * self.block_d)))  # 16 bytes of a thread
        # the kernel before makes zeros where sizes are wanted
        early = early_for(call.x.device, call.behind and not _sizes_wanted(call))
        constants: tuple[Any, ...] = (
            call.heads, call.dim, chunk, per, step, stages, at_once, self.block_d, sampled, _turns(call),
            _zeros_wanted(call), early,
        )  # fmt: skip
        sizes = self._sizes(call, per * chunk)
        self.sums = Plan(
            sum_chunks, programs, self.strides, sizes, constants, warps, 1, early=early > 0, options=_ROUND_TWICE
        )
        if call.summed:
            early = early_for(call.x.device, call.apart and (call.side == "v" or _zeros_wanted(call) > 0))
            constants = (call.heads, call.dim, chunk, per, _PARTS, self.block_d, sampled, early)
            warps = max(warps, self.block_d**2 // (32 * _EACH)) if turned else warps
            self.join = Plan(join_chunks, by_head, (), sizes[1:], constants, warps, 1, early=early > 0)

    def _warps(self, halved: bool = False) -> int:
        found = max(4, self.rows * self.block_d // (32 * _EACH))
        return min(8, found) if halved else found  # products want registers more than warps

    def _rows(self, call: Call, back: bool, early: int) -> Plan:
        batch, seqlen, blocks = self._sizes(call, self.rows)
        heads_k = call.heads if call.other is None else call.other.shape[1]
        encoding = None if call.kind in NUMBERS else "fp8" if call.kind == "fp8" else "int8"
        few = call.x.dtype == torch.float32 or self.block_d > 128
        step = min(self.block_d, _ROTATED[few]) if call.rotate else self.block_d
        constants = (
            call.heads, heads_k, call.dim, call.side == "q", call.smooth, call.shared, encoding, call.largest,
            _converts(call), self.rows, step, _PARTS, self.block_d, _turns(call), early, back,
        )  # fmt: skip
        sizes = (batch, seqlen, seqlen, blocks)
        warps = self._warps(call.rotate and call.x.dtype == torch.float32)
        return Plan(
            encode_rows, self.cells, self.strides, sizes, constants, warps, 1, early=early > 0, options=_ROUND_TWICE
        )

    def _columns(self, call: Call, back: bool, early: int) -> Plan:
        constants = (
            call.heads, call.dim, call.shared, call.largest, _converts(call), self.rows, self.block_d, back, early,
        )  # fmt: skip
        sizes, warps = self._sizes(call, self.rows), self._warps()
        return Plan(
            encode_columns, self.cells, self.strides, sizes, constants, warps, 1, early=early > 0, options=_ROUND_TWICE
        )


def _block_of(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    """From a sequence, a row and a head to the next."""
    return (0, *x.stride()[:2]) if x.ndim == 3 else x.stride()[:3]


def _turns(call: Call) -> tuple[int, bool]:
    """How many dimensions are turned, and whether neighbours are."""
    return call.rotary_dim, call.interleaved


def _converts(call: Call) -> bool:
    """Whether the GPU has an instruction that makes FP8 of float32."""
    return capability(call.x.device) >= 89


@functools.lru_cache(maxsize=16)
def _signs(dim: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The rotation's matrix, without its factor."""
    return matrix(dim, 0, device).sign().to(dtype)
