"""Merging on a GPU: a program owns some rows (batch, row, head) and reads their states once, in order.

The merge law: lse = log sum exp(lse_n), o = sum exp(lse_n - lse) o_n (Milakov and Gimelshein 2018; Flash-Decoding, Dao
et al. 2023). Weights come from two looks at lse, which is small beside o, so they need no rescaling; the backward looks
again instead of reading what the forward rounded.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.merge.problem import Call, Form, lse_view, o_view
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.tiles.arithmetic import LN2, LOG2E

_ELEMENTS = 2048  # of a program's tile (rows, states, head_dim_v)
_STATES = 16  # of a tile at most
_WARPS = 4
_PLANS = Plans()


# device functions ----------------------------------------------------------------------------------------------------


@triton.jit
def own_rows(rows, seqlen, HEADS: tl.constexpr, BLOCK_R: tl.constexpr):
    """This program's rows: their number (batch, row, head), whether they exist, and the three it is made of."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    m = row // HEADS
    return row, row < rows, m // seqlen, m % seqlen, row % HEADS


@triton.jit
def own_states(INDPTR, m, in_r, states):
    """(first, count) of each row's states, and the largest count."""
    if INDPTR is not None:
        first = tl.load(INDPTR + m, mask=in_r, other=0).to(tl.int64)
        count = tl.load(INDPTR + m + 1, mask=in_r, other=0).to(tl.int64) - first
        most = tl.max(count, 0)
    else:
        first = tl.zeros_like(m)
        count = tl.where(in_r, states, 0).to(tl.int64)
        most = states
    return first, count, most


@triton.jit
def load_lse(LSE_PARTS, strides, n: tl.constexpr, b, m, h, number, alive):
    """lse of states `number` of tensor n, -inf where none is  # [BLOCK_R, BLOCK_S]"""
    base = b * strides[4 * n + 1] + h * strides[4 * n + 2] + m * strides[4 * n + 3]
    return tl.load(LSE_PARTS[n] + base[:, None] + number * strides[4 * n], mask=alive, other=float("-inf")).to(
        tl.float32
    )


@triton.jit
def load_o(O_PARTS, strides, n: tl.constexpr, b, m, h, number, used, offs_dv, HEAD_DIM_V: tl.constexpr):
    """o of states `number` of tensor n, 0 where not used  # [BLOCK_R, BLOCK_S, BLOCK_DV]"""
    base = b * strides[4 * n + 1] + m * strides[4 * n + 2] + h * strides[4 * n + 3]
    rows = base[:, None] + number * strides[4 * n]
    inside = used[:, :, None] & (offs_dv < HEAD_DIM_V)[None, None, :]
    return tl.load(O_PARTS[n] + rows[:, :, None] + offs_dv[None, None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def normaliser(
    LSE_PARTS, strides, b, m, h, first, count, most,
    SOURCES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """(shift, total): the weight of a state is exp(lse - shift) / total; shift is finite, total 0 without a state."""
    offs_s = tl.arange(0, BLOCK_S)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for n in tl.static_range(SOURCES):
        for start in range(0, 1 if SOURCES > 1 else most, BLOCK_S):
            nth = start + offs_s
            alive = nth[None, :] < count[:, None]
            lse = load_lse(LSE_PARTS, strides, n, b, m, h, first[:, None] + nth[None, :], alive)
            top = tl.maximum(top, tl.max(lse, 1))
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.zeros([BLOCK_R], tl.float32)
    for n in tl.static_range(SOURCES):
        for start in range(0, 1 if SOURCES > 1 else most, BLOCK_S):
            nth = start + offs_s
            alive = nth[None, :] < count[:, None]
            lse = load_lse(LSE_PARTS, strides, n, b, m, h, first[:, None] + nth[None, :], alive)
            total += tl.sum(tl.math.exp2((lse - shift[:, None]) * LOG2E), 1)
    return shift, total


@triton.jit
def states_at(LSE_PARTS, strides, n: tl.constexpr, b, m, h, first, count, start, shift, BLOCK_S: tl.constexpr):
    """(numbers, which there are, which are used, weights times the total) of states `start` on  # [BLOCK_R, BLOCK_S]"""
    nth = start + tl.arange(0, BLOCK_S)
    number = first[:, None] + nth[None, :]
    alive = nth[None, :] < count[:, None]
    part = load_lse(LSE_PARTS, strides, n, b, m, h, number, alive)
    return number, alive, alive & (part != float("-inf")), tl.math.exp2((part - shift[:, None]) * LOG2E)


# kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "seqlen", "states"])
def merge_fwd(
    O_PARTS, LSE_PARTS, INDPTR, O, LSE, strides_o, strides_lse, rows, seqlen, states,
    HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, SOURCES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    # who am I
    row, in_r, b, m, h = own_rows(rows, seqlen, HEADS, BLOCK_R)
    first, count, most = own_states(INDPTR, m, in_r, states)

    # prologue: the weights' scale
    shift, total = normaliser(LSE_PARTS, strides_lse, b, m, h, first, count, most, SOURCES, BLOCK_R, BLOCK_S)
    empty = total == 0.0
    safe_total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), shift + tl.math.log2(safe_total) * LN2)
    tl.store(LSE + (b * HEADS + h) * seqlen + m, lse, mask=in_r)

    # main loop: a part of the columns, and every state of it
    for start_dv in range(0, HEAD_DIM_V, BLOCK_DV):
        offs_dv = start_dv + tl.arange(0, BLOCK_DV)
        acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
        for n in tl.static_range(SOURCES):
            for start in range(0, 1 if SOURCES > 1 else most, BLOCK_S):
                number, _alive, used, weight = states_at(
                    LSE_PARTS, strides_lse, n, b, m, h, first, count, start, shift, BLOCK_S
                )
                o = load_o(O_PARTS, strides_o, n, b, m, h, number, used, offs_dv, HEAD_DIM_V)
                acc += tl.sum(o * weight[:, :, None], 1)
        inside = in_r[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
        o_ptrs = O + row[:, None] * HEAD_DIM_V + offs_dv[None, :]
        tl.store(o_ptrs, (acc / safe_total[:, None]).to(O.dtype.element_ty), mask=inside)


@triton.jit
def into_do(
    O_PARTS, DO, strides_o, stride_dob, stride_dos, stride_doh, n: tl.constexpr, b, m, h, in_r, number, used,
    HEAD_DIM_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """<do, o> of each state, 0 where not used  # [BLOCK_R, BLOCK_S]"""
    onto = tl.zeros([BLOCK_R, BLOCK_S], tl.float32)
    for start_dv in range(0, HEAD_DIM_V, BLOCK_DV):
        offs_dv = start_dv + tl.arange(0, BLOCK_DV)
        inside = in_r[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
        do_ptrs = DO + (b * stride_dob + m * stride_dos + h * stride_doh)[:, None] + offs_dv[None, :]
        do = tl.load(do_ptrs, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_DV]
        o = load_o(O_PARTS, strides_o, n, b, m, h, number, used, offs_dv, HEAD_DIM_V)
        onto += tl.sum(o * do[:, None, :], 2)
    return tl.where(used, onto, 0.0)


@triton.jit(do_not_specialize=["rows", "seqlen", "states"])
def merge_bwd(
    O_PARTS, LSE_PARTS, INDPTR, DO, DLSE, DO_PARTS, DLSE_PARTS, strides_o, strides_lse, strides_do, strides_dlse,
    stride_dob, stride_dos, stride_doh, stride_db, stride_dh, stride_ds, rows, seqlen, states,
    HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, SOURCES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    # who am I
    _, in_r, b, m, h = own_rows(rows, seqlen, HEADS, BLOCK_R)
    first, count, most = own_states(INDPTR, m, in_r, states)

    # prologue: the weights' scale, and the mean of <do, o> over states, which is <do, merged o>
    shift, total = normaliser(LSE_PARTS, strides_lse, b, m, h, first, count, most, SOURCES, BLOCK_R, BLOCK_S)
    safe_total = tl.where(total == 0.0, 1.0, total)
    dlse = tl.load(DLSE + b * stride_db + h * stride_dh + m * stride_ds, mask=in_r, other=0.0)
    mean = tl.zeros([BLOCK_R], tl.float32)
    for n in tl.static_range(SOURCES):
        for start in range(0, 1 if SOURCES > 1 else most, BLOCK_S):
            number, alive, used, weight = states_at(
                LSE_PARTS, strides_lse, n, b, m, h, first, count, start, shift, BLOCK_S
            )
            weight = weight / safe_total[:, None]
            onto = into_do(
                O_PARTS, DO, strides_o, stride_dob, stride_dos, stride_doh, n, b, m, h, in_r, number, used,
                HEAD_DIM_V, BLOCK_R, BLOCK_S, BLOCK_DV,
            )  # fmt: skip
            mean += tl.sum(weight * onto, 1)

    # main loop: every state again, now from a cache
    for n in tl.static_range(SOURCES):
        for start in range(0, 1 if SOURCES > 1 else most, BLOCK_S):
            number, alive, used, weight = states_at(
                LSE_PARTS, strides_lse, n, b, m, h, first, count, start, shift, BLOCK_S
            )
            weight = weight / safe_total[:, None]
            onto = into_do(
                O_PARTS, DO, strides_o, stride_dob, stride_dos, stride_doh, n, b, m, h, in_r, number, used,
                HEAD_DIM_V, BLOCK_R, BLOCK_S, BLOCK_DV,
            )  # fmt: skip
            into = tl.where(used, weight * (dlse[:, None] + (onto - mean[:, None])), 0.0)
            base = b * strides_dlse[4 * n + 1] + h * strides_dlse[4 * n + 2] + m * strides_dlse[4 * n + 3]
            tl.store(DLSE_PARTS[n] + base[:, None] + number * strides_dlse[4 * n], into, mask=alive)
            base = b * strides_do[4 * n + 1] + m * strides_do[4 * n + 2] + h * strides_do[4 * n + 3]
            places = base[:, None] + number * strides_do[4 * n]
            for start_dv in range(0, HEAD_DIM_V, BLOCK_DV):
                offs_dv = start_dv + tl.arange(0, BLOCK_DV)
                inside = in_r[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
                do_ptrs = DO + (b * stride_dob + m * stride_dos + h * stride_doh)[:, None] + offs_dv[None, :]
                do = tl.load(do_ptrs, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_DV]
                part_do = tl.where(used[:, :, None], weight[:, :, None] * do[:, None, :], 0.0)
                tl.store(
                    DO_PARTS[n] + places[:, :, None] + offs_dv[None, None, :],
                    part_do.to(DO_PARTS[n].dtype.element_ty),
                    mask=alive[:, :, None] & (offs_dv < HEAD_DIM_V)[None, None, :],
                )


# launches ------------------------------------------------------------------------------------------------------------


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse)"""
    o, lse = call.new_output(), call.new_lse()
    key = _key(call)
    plan = _PLANS.get(key)
    if plan is None:
        strides = (_o_strides(call, call.o), _lse_strides(call, call.lse))
        plan = _PLANS.put(key, _plan(merge_fwd, call, strides))
    with on_device(o):
        plan.launch((call.o, call.lse, call.indptr, o, lse), ())
    return o, lse


def backward(call: Call, do: torch.Tensor, dlse: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of every o and every lse."""
    grads_o, grads_lse = (
        tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in found) for found in (call.o, call.lse)
    )
    key = _key(call, do, dlse)
    plan = _PLANS.get(key)
    if plan is None:
        into_do = do.stride()[:3] if do.ndim == 4 else (0, *do.stride()[:2])
        into_lse = dlse.stride() if dlse.ndim == 3 else (0, *dlse.stride())
        read = (_o_strides(call, call.o), _lse_strides(call, call.lse))
        written = (_o_strides(call, grads_o), _lse_strides(call, grads_lse))
        plan = _PLANS.put(key, _plan(merge_bwd, call, (*read, *written, *into_do, *into_lse)))
    with on_device(do):
        plan.launch((call.o, call.lse, call.indptr, do, dlse, grads_o, grads_lse), ())
    return list(grads_o), list(grads_lse)


def _key(call: Call, *incoming: torch.Tensor):
    """Everything that may change which kernel runs or how (the backward has `incoming` gradients); None where a pointer
    would need a variant of its own.
    """
    there = () if call.indptr is None else (call.indptr,)
    key = tensors_key(*call.o, *call.lse, *there, *incoming)
    return None if key is None else (key, len(incoming), call.form, call.dtype)


def _plan(kernel, call: Call, strides) -> Plan:
    states, batch, seqlen, heads, head_dim_v = o_view(call.o[0], call.form).shape
    if call.indptr is not None:
        seqlen = call.indptr.shape[0] - 1
    rows = batch * seqlen * heads
    block_dv = min(512, triton.next_power_of_2(head_dim_v))
    # rows of `indptr` have few states more often than many
    block_s = min(_STATES if call.form is Form.STACKED else 4, triton.next_power_of_2(states))
    if call.form is Form.SEPARATE:
        block_s = 1
    # columns that are not known to be aligned are fetched one by one, each by a pointer of its own
    elements = _ELEMENTS if head_dim_v % 16 == 0 else _ELEMENTS // 2
    block_r = min(max(1, elements // (block_s * block_dv)), triton.next_power_of_2(rows))
    constants = (heads, head_dim_v, len(call.o), block_r, block_s, block_dv)
    return Plan(kernel, -(-rows // block_r), strides, (rows, seqlen, states), constants, _WARPS, 1)


def _o_strides(call: Call, tensors) -> tuple[int, ...]:
    """Of every tensor: from state to state, batch element, row, head; all rows of `indptr` begin at state 0."""
    found = []
    for x in tensors:
        state, *others = o_view(x, call.form).stride()[:4]
        found += [state, *((0, 0, others[2]) if call.form is Form.RAGGED else others)]
    return tuple(found)


def _lse_strides(call: Call, tensors) -> tuple[int, ...]:
    """Of every tensor: from state to state, batch element, head, row."""
    found = []
    for x in tensors:
        state, *others = lse_view(x, call.form).stride()
        found += [state, *((0, others[1], 0) if call.form is Form.RAGGED else others)]
    return tuple(found)
