"""Writes on a GPU: a program moves some columns (head and dimension, in a row) of some tokens, or of one page, first of
the keys and then of the values.

A thread has neighbouring columns, so where dimensions, strides and pointers are multiples of 16 bytes they travel as
one. Pools are larger than 2**31 elements: whatever is multiplied by a stride is 64 bits wide.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tilewise.ops.kv_write.problem import Copy, Write
from tilewise.ops.triton_launch import Plan, Plans, on_device, tensors_key
from tilewise.quant.codes import BY_DTYPE
from tilewise.rotary import Rope
from tilewise.tiles.codes import codes_by_channel, codes_of, scales_of, spans_of
from tilewise.tiles.rotary import angles_of, turned

_WRITTEN = 1024  # elements of a program's tile (tokens, columns): a decode step has few tokens, and wants programs
_COPIED = 2048  # columns of a program, of a page
_ALONE = 1024  # tokens up to which each has programs of its own that look whether it fills its page
_WARPS = 4
_PLANS = Plans()


# device functions ----------------------------------------------------------------------------------------------------


@triton.jit
def head_and_dim(column, HEADS: tl.constexpr, DIM: tl.constexpr):
    """The head and the dimension of columns of a row of heads, or of several rows."""
    RUN: tl.constexpr = 16 if DIM % 16 == 0 else DIM & (0 - DIM)  # columns that lie side by side, whatever DIM is
    head = tl.max_constancy(column // DIM % HEADS, RUN)
    return head, tl.max_contiguous(tl.multiple_of(column % DIM, RUN), RUN)


@triton.jit
def columns_of(column, stride_h, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Where columns of a row of heads, or of several rows, lie in their row."""
    head, dim = head_and_dim(column, HEADS, DIM)
    return head.to(tl.int64) * stride_h + dim


@triton.jit
def write_rows(
    X, PAGES, ROPE, stride_xt, stride_xh, stride_pp, stride_ps, stride_ph, token, page, offset, used, column,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Some columns of k or v into their slots, turned where there is a ROPE  # [BLOCK_T, BLOCK_C]"""
    into_x = columns_of(column, stride_xh, HEADS, DIM)
    into_page = columns_of(column, stride_ph, HEADS, DIM)
    inside = used[:, None] & (column < HEADS * DIM)[None, :]
    x = tl.load(X + (token * stride_xt)[:, None] + into_x[None, :], mask=inside)
    if ROPE is not None:
        head, dim = head_and_dim(column, HEADS, DIM)
        rows = X + (token * stride_xt)[:, None] + (head.to(tl.int64) * stride_xh)[None, :]
        cos, sin = angles_of(ROPE, token, used)
        x = turned(x, rows, dim, cos, sin, inside, used, DIM, ROTARY, INTERLEAVED).to(X.dtype.element_ty)
    slot = page * stride_pp + offset * stride_ps
    tl.store(PAGES + slot[:, None] + into_page[None, :], x, mask=inside)


@triton.jit
def encode_rows(
    X, PAGES, SCALES, ROPE, stride_xt, stride_xh, stride_pp, stride_ps, stride_ph, stride_sp, stride_ss, stride_sh,
    token, head, page, offset, used, DIM: tl.constexpr, BLOCK: tl.constexpr, ENCODING: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Some heads of k or v, turned where there is a ROPE, as codes, into their slots  # [BLOCK_R, BLOCK]"""
    IN_BYTE: tl.constexpr = 2 if ENCODING == "int4" else 1
    STEP: tl.constexpr = DIM // IN_BYTE
    offs = tl.arange(0, BLOCK // IN_BYTE)
    inside = used[:, None] & (offs < STEP)[None, :]
    rows = X + (token * stride_xt + head * stride_xh)[:, None]
    low = tl.load(rows + offs[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROPE is not None:
        cos, sin = angles_of(ROPE, token, used)
        low = turned(low, rows, offs, cos, sin, inside, used, STEP, ROTARY, INTERLEAVED)
    high = low
    if ENCODING == "int4":
        high = tl.load(rows + offs[None, :] + STEP, mask=inside, other=0.0).to(tl.float32)
        if ROPE is not None:
            high = turned(high, rows, offs + STEP, cos, sin, inside, used, STEP, ROTARY, INTERLEAVED)
    scale = scales_of(low, high, ENCODING)
    code = codes_of(low, scale, ENCODING)
    if ENCODING == "int4":
        code |= codes_of(high, scale, ENCODING) << 4
    slot = page * stride_pp + offset * stride_ps + head * stride_ph
    tl.store(PAGES + slot[:, None] + offs[None, :], code.to(tl.uint8), mask=inside)
    tl.store(SCALES + page * stride_sp + offset * stride_ss + head * stride_sh, scale, mask=used)


@triton.jit
def keep_rows(
    X, OPEN, ROPE, stride_xt, stride_xh, stride_op, stride_os, stride_oh, token, head, row, offset, used,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Some heads of k, turned where there is a ROPE, into rows of open pages  # [BLOCK_R, BLOCK]"""
    offs = tl.arange(0, BLOCK)
    inside = used[:, None] & (offs < DIM)[None, :]
    rows = X + (token * stride_xt + head * stride_xh)[:, None]
    x = tl.load(rows + offs[None, :], mask=inside)
    if ROPE is not None:
        cos, sin = angles_of(ROPE, token, used)
        x = turned(x, rows, offs, cos, sin, inside, used, DIM, ROTARY, INTERLEAVED).to(X.dtype.element_ty)
    slot = row * stride_op + offset * stride_os + head * stride_oh
    tl.store(OPEN + slot[:, None] + offs[None, :], x, mask=inside)


@triton.jit
def page_of_keys(
    K, OPEN, ROPE, stride_kt, stride_kh, stride_op, stride_os, stride_oh, tokens, new, head, row, offs, inside, dims,
    STEP: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Dimensions `dims`, as `turned` has them, of all keys of a page, float32: new ones turned and rounded as open
    pages hold them, the others from their row  # [PAGE, BLOCK]
    """
    there = dims < DIM
    is_new = new[:, None] & there[None, :]
    rows = K + (tokens * stride_kt + head * stride_kh)[:, None]
    x = tl.load(rows + dims[None, :], mask=is_new, other=0.0)
    if ROPE is not None:
        cos, sin = angles_of(ROPE, tokens, new)
        x = turned(x, rows, dims, cos, sin, is_new, new, STEP, ROTARY, INTERLEAVED).to(K.dtype.element_ty)
    slot = row * stride_op + offs * stride_os + head * stride_oh
    old = tl.load(OPEN + slot[:, None] + dims[None, :], mask=(inside & ~new)[:, None] & there[None, :], other=0.0)
    return tl.where(new[:, None], x, old).to(tl.float32)


@triton.jit
def copy_columns(
    PAGES, stride_p, stride_s, stride_h, source, target, column,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Some columns of a page of k or v, all tokens in a row, onto another page  # [BLOCK_C]"""
    RUN: tl.constexpr = 16 if DIM % 16 == 0 else DIM & (0 - DIM)
    token = tl.max_constancy(column // (HEADS * DIM), RUN)
    in_page = token.to(tl.int64) * stride_s + columns_of(column, stride_h, HEADS, DIM)
    exists = column < PAGE * HEADS * DIM
    x = tl.load(PAGES + source * stride_p + in_page, mask=exists)
    tl.store(PAGES + target * stride_p + in_page, x, mask=exists)


# kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens"])
def write_tokens(
    K, V, K_PAGES, V_PAGES, SLOTS, ROPE, stride_kt, stride_kh, stride_vt, stride_vh, stride_kpp, stride_kps, stride_kph,
    stride_vpp, stride_vps, stride_vph, tokens,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    # who am I
    program = tl.program_id(0)
    token = (program // PARTS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = program % PARTS * BLOCK_C + tl.arange(0, BLOCK_C)

    # where the tokens go
    slot = tl.load(SLOTS + token, mask=token < tokens, other=-1).to(tl.int64)
    used = slot >= 0
    page = slot // PAGE
    offset = slot % PAGE

    write_rows(
        K, K_PAGES, ROPE, stride_kt, stride_kh, stride_kpp, stride_kps, stride_kph, token, page, offset, used, column,
        HEADS, DIM, ROTARY, INTERLEAVED,
    )  # fmt: skip
    write_rows(
        V, V_PAGES, None, stride_vt, stride_vh, stride_vpp, stride_vps, stride_vph, token, page, offset, used, column,
        HEADS, DIM_V, 0, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def encode_tokens(
    K, V, K_PAGES, V_PAGES, K_SCALES, V_SCALES, SLOTS, ROPE, stride_kt, stride_kh, stride_vt, stride_vh, stride_kpp,
    stride_kps, stride_kph, stride_vpp, stride_vps, stride_vph, stride_ksp, stride_kss, stride_ksh, stride_vsp,
    stride_vss, stride_vsh, tokens,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ENCODING: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    # who am I
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = row // HEADS
    head = row % HEADS

    # where the tokens go
    slot = tl.load(SLOTS + token, mask=token < tokens, other=-1).to(tl.int64)
    used = slot >= 0
    page = slot // PAGE
    offset = slot % PAGE

    encode_rows(
        K, K_PAGES, K_SCALES, ROPE, stride_kt, stride_kh, stride_kpp, stride_kps, stride_kph, stride_ksp, stride_kss,
        stride_ksh, token, head, page, offset, used, DIM, BLOCK_D, ENCODING, ROTARY, INTERLEAVED,
    )  # fmt: skip
    encode_rows(
        V, V_PAGES, V_SCALES, None, stride_vt, stride_vh, stride_vpp, stride_vps, stride_vph, stride_vsp, stride_vss,
        stride_vsh, token, head, page, offset, used, DIM_V, BLOCK_DV, ENCODING, 0, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def encode_full_pages(
    K, PAGES, SCALES, LEAST, OPEN, PLACE, SLOTS, ROPE, stride_kt, stride_kh, stride_pp, stride_ps, stride_ph, stride_sp,
    stride_sh, stride_lp, stride_lh, stride_op, stride_os, stride_oh, tokens,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr, RUN: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Keys by channel of the pages that the last tokens of a run of RUN fill, some bytes of a row, of one head."""
    # who am I
    STEP: tl.constexpr = DIM * BITS // 8
    PARTS: tl.constexpr = (STEP + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    part = program % PARTS
    head = program // PARTS % HEADS
    first = (program // (PARTS * HEADS)).to(tl.int64) * RUN
    offs = tl.arange(0, BLOCK_P)
    inside = offs < PAGE
    columns = part * BLOCK + tl.arange(0, BLOCK)

    for last in range(first, tl.minimum(first + RUN, tokens)):
        slot = tl.load(SLOTS + last).to(tl.int64)
        page = tl.maximum(slot, 0) // PAGE
        place = tl.load(PLACE + page).to(tl.int64)
        if (slot >= 0) & (slot % PAGE == PAGE - 1) & (place < 0):
            # which of the page's tokens are here
            token = last - PAGE + 1 + offs
            new = inside & (token >= 0)
            new = new & (tl.load(SLOTS + token, mask=new, other=-1) == slot - PAGE + 1 + offs)

            code = tl.zeros([BLOCK_P, BLOCK], tl.int32)
            for n in tl.static_range(8 // BITS):
                dims = tl.where(columns < STEP, n * STEP + columns, DIM)
                x = page_of_keys(
                    K, OPEN, ROPE, stride_kt, stride_kh, stride_op, stride_os, stride_oh, token, new, head, -1 - place,
                    offs, inside, dims, STEP | BLOCK, DIM, ROTARY, INTERLEAVED,
                )  # fmt: skip
                step, least = spans_of(x, inside, BITS)
                step = step.to(SCALES.dtype.element_ty)
                least = least.to(SCALES.dtype.element_ty)
                code |= codes_by_channel(x, step.to(tl.float32), least.to(tl.float32), BITS) << (n * BITS)
                there = dims < DIM
                tl.store(SCALES + page * stride_sp + head * stride_sh + dims, step, mask=there)
                tl.store(LEAST + page * stride_lp + head * stride_lh + dims, least, mask=there)
            rows = page * stride_pp + offs * stride_ps + head * stride_ph
            at = PAGES + rows[:, None] + columns[None, :]
            tl.store(at, code.to(tl.uint8), mask=inside[:, None] & (columns < STEP)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def keep_keys_encode_values(
    K, V, OPEN, V_PAGES, V_SCALES, PLACE, SLOTS, ROPE, stride_kt, stride_kh, stride_vt, stride_vh, stride_op, stride_os,
    stride_oh, stride_vpp, stride_vps, stride_vph, stride_vsp, stride_vss, stride_vsh, tokens,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ENCODING: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Keys of open pages as they are, values of all pages as codes."""
    # who am I
    at = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = at // HEADS
    head = at % HEADS

    # where the tokens go
    slot = tl.load(SLOTS + token, mask=token < tokens, other=-1).to(tl.int64)
    used = slot >= 0
    page = slot // PAGE
    offset = slot % PAGE
    row = tl.load(PLACE + page, mask=used, other=-1).to(tl.int64)

    keep_rows(
        K, OPEN, ROPE, stride_kt, stride_kh, stride_op, stride_os, stride_oh, token, head, row, offset, row >= 0, DIM,
        BLOCK_D, ROTARY, INTERLEAVED,
    )  # fmt: skip
    encode_rows(
        V, V_PAGES, V_SCALES, None, stride_vt, stride_vh, stride_vpp, stride_vps, stride_vph, stride_vsp, stride_vss,
        stride_vsh, token, head, page, offset, used, DIM_V, BLOCK_DV, ENCODING, 0, False,
    )  # fmt: skip


@triton.jit
def copy_whole_pages(
    K_PAGES, V_PAGES, PAIRS, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    # who am I
    program = tl.program_id(0)
    pair = program // PARTS
    column = program % PARTS * BLOCK_C + tl.arange(0, BLOCK_C)

    # which pages
    source = tl.load(PAIRS + 2 * pair).to(tl.int64)
    target = tl.load(PAIRS + 2 * pair + 1).to(tl.int64)

    if source >= 0 and target >= 0:
        copy_columns(K_PAGES, stride_kp, stride_ks, stride_kh, source, target, column, PAGE, HEADS, DIM)
        copy_columns(V_PAGES, stride_vp, stride_vs, stride_vh, source, target, column, PAGE, HEADS, DIM_V)


# launches ------------------------------------------------------------------------------------------------------------


def write(call: Write) -> None:
    """Tokens into their slots."""
    if call.channels is not None:
        _write_by_channel(call)
        return
    if call.scales is not None:
        _write_encoded(call)
        return
    tensors = (call.k, call.v, call.k_pages, call.v_pages, call.slots)
    key = _key("write", tensors, call.rope)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _write_plan(call))
    with on_device(call.k):
        plan.launch((*tensors, _angles(call)), ())


def _write_encoded(call: Write) -> None:
    tensors = (call.k, call.v, call.k_pages, call.v_pages, *call.scales, call.slots)
    key = _key("encode", tensors, call.rope)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _encode_plan(call))
    k, v, k_pages, v_pages, *rest = tensors
    with on_device(call.k):  # Triton has no float8 on older GPUs
        plan.launch((k, v, k_pages.view(torch.uint8), v_pages.view(torch.uint8), *rest, _angles(call)), ())


def _write_by_channel(call: Write) -> None:
    """Full pages first: a row that held keys of theirs may be another page's now."""
    pages = call.channels
    tensors = (
        call.k, call.v, pages.data, pages.scale, pages.least, pages.open, pages.place, call.v_pages, call.scales[1],
        call.slots,
    )  # fmt: skip
    key = _key("channels", tensors, call.rope)
    plans = _PLANS.get(key)
    if plans is None:
        plans = _PLANS.put(key, (_full_pages_plan(call), _keep_plan(call)))
    angles, values = _angles(call), call.v_pages.view(torch.uint8)
    with on_device(call.k):
        full = (call.k, pages.data, pages.scale, pages.least, pages.open, pages.place, call.slots, angles)
        plans[0].launch(full, ())
        kept = (call.k, call.v, pages.open, values, call.scales[1], pages.place, call.slots, angles)
        plans[1].launch(kept, ())


def _angles(call: Write) -> tuple[Any, ...] | None:
    """A rope as kernels take it."""
    rope = call.rope
    return None if rope is None else (rope.cos, rope.sin, rope.positions, rope.cos.stride(0), rope.sin.stride(0))


def copy(call: Copy) -> None:
    """Pages onto others."""
    tensors = (call.k_pages, call.v_pages, call.pairs)
    key = _key("copy", tensors)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, _copy_plan(call))
    with on_device(call.k_pages):
        plan.launch(tensors, ())


def _key(what: str, tensors: tuple[torch.Tensor, ...], rope: Rope | None = None):
    """Everything that may change which kernel runs or how; None where a pointer would need a variant of its own."""
    angles = () if rope is None else (rope.cos, rope.sin, rope.positions)
    key = tensors_key(*tensors, *angles)
    return None if key is None else (key, what, rope is not None and rope.interleaved)


def _write_plan(call: Write) -> Plan:
    tokens, heads, dim = call.k.shape
    dim_v = call.v.shape[2]
    columns = heads * max(dim, dim_v)
    block_c = min(_WRITTEN, triton.next_power_of_2(columns))
    block_t = min(_WRITTEN // block_c, triton.next_power_of_2(tokens))
    parts = -(-columns // block_c)
    strides = (
        *call.k.stride()[:2], *call.v.stride()[:2], *call.k_pages.stride()[:3], *call.v_pages.stride()[:3],
    )  # fmt: skip
    constants = (call.k_pages.shape[1], heads, dim, dim_v, parts, block_t, block_c, *_turns(call))
    grid = -(-tokens // block_t) * parts
    return Plan(write_tokens, grid, strides, (tokens,), constants, _WARPS, 1, options=_options(call))


def _encode_plan(call: Write) -> Plan:
    strides = (*call.k_pages.stride()[:3], *call.v_pages.stride()[:3], *call.scales[0].stride())
    return _rows_plan(call, encode_tokens, strides)


def _rows_plan(call: Write, kernel: Any, strides: tuple[int, ...]) -> Plan:
    """The plan of a kernel that encodes values, whose programs have some heads of some tokens; `strides` are those
    between the tokens' and of the values' scales.
    """
    tokens, heads, dim = call.k.shape
    dim_v = call.v.shape[2]
    block_d, block_dv = triton.next_power_of_2(dim), triton.next_power_of_2(dim_v)
    block_r = min(max(1, _WRITTEN // max(block_d, block_dv)), triton.next_power_of_2(tokens * heads))
    strides = (*call.k.stride()[:2], *call.v.stride()[:2], *strides, *call.scales[1].stride())
    constants = (
        call.v_pages.shape[1], heads, dim, dim_v, block_r, block_d, block_dv, BY_DTYPE[call.v_pages.dtype],
        *_turns(call),
    )  # fmt: skip
    grid = triton.cdiv(tokens * heads, block_r)
    return Plan(kernel, grid, strides, (tokens,), constants, _WARPS, 1, options=_options(call))


def _full_pages_plan(call: Write) -> Plan:
    tokens, heads, dim = call.k.shape
    pages = call.channels
    page_size, step = pages.data.shape[1], pages.data.shape[3]
    block_p = triton.next_power_of_2(page_size)
    block = min(max(16, _COPIED // block_p), triton.next_power_of_2(step))
    run = 1 if tokens <= _ALONE else 16
    strides = (
        *call.k.stride()[:2], *pages.data.stride()[:3], *pages.scale.stride()[:2], *pages.least.stride()[:2],
        *pages.open.stride()[:3],
    )  # fmt: skip
    constants = (page_size, heads, dim, pages.bits, block_p, block, run, *_turns(call))
    grid = triton.cdiv(tokens, run) * heads * triton.cdiv(step, block)
    return Plan(encode_full_pages, grid, strides, (tokens,), constants, _WARPS, 1, options=_options(call))


def _keep_plan(call: Write) -> Plan:
    strides = (*call.channels.open.stride()[:3], *call.v_pages.stride()[:3])
    return _rows_plan(call, keep_keys_encode_values, strides)


def _turns(call: Write) -> tuple[int, bool]:
    """How many dimensions are turned, and whether neighbours are."""
    return (0, False) if call.rope is None else (call.rope.rotary_dim, call.rope.interleaved)


def _options(call: Write) -> dict[str, Any]:
    return {} if call.rope is None else {"enable_fp_fusion": False}


def _copy_plan(call: Copy) -> Plan:
    _, page_size, heads, dim = call.k_pages.shape
    dim_v = call.v_pages.shape[3]
    columns = page_size * heads * max(dim, dim_v)
    block_c = min(_COPIED, triton.next_power_of_2(columns))
    parts = -(-columns // block_c)
    strides = (*call.k_pages.stride()[:3], *call.v_pages.stride()[:3])
    constants = (page_size, heads, dim, dim_v, parts, block_c)
    return Plan(copy_whole_pages, call.pairs.shape[0] * parts, strides, (), constants, _WARPS, 1)
