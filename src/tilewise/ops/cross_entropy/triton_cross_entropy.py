"""Cross entropy on a GPU: a program reads a token's logits once for its loss; their gradient is elementwise.

Each lane has a maximum and a sum of its own (Milakov and Gimelshein 2018), so that lanes meet once. Logits of ignored
tokens are not read. Under a linear layer logits are there a chunk of tokens at a time, and their gradient is written
over them, as in Liger Kernel (Hsu et al. 2024).
"""

import math

import torch
import triton
import triton.language as tl

from tilewise.ops.cross_entropy.problem import Call, LinearCall, Tensors
from tilewise.ops.triton_launch import Plan, Plans, as_rows, on_device, tensors_key
from tilewise.tiles.arithmetic import LN2, LOG2E, known_multiple, softmax_step, tanh

_STEP = 8192  # logits of a program's step through a token's
_BLOCK = 4096  # elements of a program where it does the same with each
_EACH = 16  # elements of a thread
_TOKENS = 4096  # losses that the one program which adds them reads at a time
_PLANS = Plans()


# device functions ----------------------------------------------------------------------------------------------------


@triton.jit
def class_of(TARGET, row, inside, width, ignore_index):
    """(class, whether the token has a loss)"""
    label = tl.load(TARGET + row, mask=inside, other=-1)
    return label, inside & (label != ignore_index) & (label >= 0) & (label < width)


@triton.jit
def capped(z, softcap, CAP: tl.constexpr):
    return softcap * tanh(z / softcap) if CAP else z


# kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["ignore_index"])
def token_losses(
    LOGITS, TARGET, LOSS, TOP, LOG_SUM, stride_t, width, reach, ignore_index, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    # who am I
    row = tl.program_id(0).to(tl.int64)
    reach, stride_t = known_multiple(reach, ALIGN), known_multiple(stride_t, ALIGN)
    label, seen = class_of(TARGET, row, True, width, ignore_index)
    offs_l = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    logits = LOGITS + row * stride_t
    end = reach * seen.to(tl.int32)

    own = capped(tl.load(logits + label, mask=seen, other=0.0).to(tl.float32), softcap, CAP)
    base = tl.where(own == float("-inf"), 0.0, own)  # of what is summed: no large numbers that cancel in the mean

    # main loop
    m_i = tl.full([LANES], float("-inf"), tl.float32)
    l_i = tl.zeros([LANES], tl.float32)
    sum_i = tl.zeros([LANES], tl.float32)
    for start in range(0, end, LANES * VECTOR):
        offs = start + offs_l
        z = tl.load(logits + offs, mask=offs < reach, other=0.0).to(tl.float32)  # [LANES, VECTOR]
        s = capped(z, softcap, CAP)
        if SMOOTH:
            sum_i += tl.sum(tl.where(offs < width, s - base, 0.0), 1)
        m_i, l_i, _, _ = softmax_step(tl.where(offs < width, s, float("-inf")), m_i, l_i)

    # epilogue
    top = tl.max(m_i, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    log_sum = tl.math.log2(tl.sum(l_i * tl.math.exp2((m_i - top) * LOG2E), 0)) * LN2
    lse = top + log_sum
    loss = log_sum - (1.0 - smoothing) * (own - top) + z_loss * lse * lse
    if SMOOTH:
        loss -= smoothing * (tl.sum(sum_i, 0) / width + (base - top))
    tl.store(LOSS + row, tl.where(seen, loss, 0.0))
    tl.store(TOP + row, top)
    tl.store(LOG_SUM + row, log_sum)


@triton.jit(do_not_specialize=["ignore_index", "blocks"])
def token_slopes(
    LOGITS, TARGET, TOP, LOG_SUM, DLOSS, SCALE, DLOGITS, stride_t, stride_dt, stride_dloss, width, reach, blocks,
    ignore_index, smoothing, z_loss, softcap, CAP: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # who am I
    row = tl.program_id(0).to(tl.int64) // blocks
    reach, stride_t = known_multiple(reach, ALIGN), known_multiple(stride_t, ALIGN)
    stride_dt = known_multiple(stride_dt, ALIGN)
    offs = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    label, seen = class_of(TARGET, row, True, width, ignore_index)
    top = tl.load(TOP + row)
    log_sum = tl.load(LOG_SUM + row)
    factor = 1.0
    if DLOSS is not None:
        factor = tl.load(DLOSS + row * stride_dloss).to(tl.float32)
    if SCALE is not None:
        factor *= tl.load(SCALE)

    z = tl.load(LOGITS + row * stride_t + offs, mask=offs < reach * seen.to(tl.int32), other=0.0).to(tl.float32)
    t = tanh(z / softcap) if CAP else z
    s = softcap * t if CAP else z
    # not relative to top + log_sum, which beside logits of large magnitude is top alone
    slope = tl.math.exp2((s - top - log_sum) * LOG2E) * (1.0 + 2.0 * z_loss * (top + log_sum)) - smoothing / width
    slope -= tl.where(offs == label, 1.0 - smoothing, 0.0)
    if CAP:
        slope *= 1.0 - t * t
    slope = tl.where(seen, slope * factor, 0.0)
    tl.store(DLOGITS + row * stride_dt + offs, slope.to(DLOGITS.dtype.element_ty), mask=offs < reach)


@triton.jit(do_not_specialize=["tokens", "ignore_index"])
def add_losses(LOSSES, TARGET, LOSS, SCALE, tokens, width, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    acc = tl.zeros([BLOCK], tl.float32)
    number = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tokens, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        acc += tl.load(LOSSES + offs, mask=offs < tokens, other=0.0)
        if MEAN:
            _, seen = class_of(TARGET, offs, offs < tokens, width, ignore_index)
            number += seen.to(tl.float32)
    loss = tl.sum(acc, 0)
    if MEAN:
        count = tl.sum(number, 0)
        loss = loss / count
        tl.store(SCALE, 1.0 / tl.maximum(count, 1.0))
    tl.store(LOSS, loss)


@triton.jit
def scale_gradient(X, DLOSS, SCALE, O, size, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(DLOSS).to(tl.float32)
    if SCALE is not None:
        factor *= tl.load(SCALE)
    x = tl.load(X + offs, mask=offs < size, other=0.0).to(tl.float32)
    tl.store(O + offs, (x * factor).to(O.dtype.element_ty), mask=offs < size)


# launches ------------------------------------------------------------------------------------------------------------


def forward(call: Call, results: Tensors) -> None:
    """Fills loss, top, log_sum and scale."""
    logits, target = as_rows(call.logits), _classes(call.target)
    with on_device(logits):
        losses = _losses_of(call, results, target)
        _launch_losses(call, logits, target, losses, _totals(results), logits.shape[1])
        _launch_sum(call, losses, target, logits.shape[1], results)


def backward(call: Call, kept: Tensors, incoming, gradients: Tensors) -> None:
    """Fills the gradient of the logits."""
    logits, target = as_rows(call.logits), _classes(call.target)
    into = gradients["logits"].view(-1, logits.shape[1])
    with on_device(logits):
        dloss = incoming[0].expand(call.target.shape).reshape(-1)
        scale = kept["scale"] if call.reduction == "mean" else None
        _launch_slopes(call, logits, target, _totals(kept), dloss, scale, into, logits.shape[1])


def linear_forward(call: LinearCall, results: Tensors) -> None:
    """Fills loss, top, log_sum and scale, and the early gradients."""
    x, target, vocabulary = as_rows(call.x), _classes(call.target), call.weight.shape[0]
    with on_device(x):
        losses = _losses_of(call, results, target)
        kept = call.reduction == "none"
        totals = _totals(results) if kept else (torch.empty_like(losses), torch.empty_like(losses))
        sums = _Sums(call, {name: results[f"d{name}"] for name in call.early})
        for rows, logits in _chunks_of_logits(call, x):
            own = tuple(x[rows] for x in totals)
            _launch_losses(call, logits, target[rows], losses[rows], own, vocabulary)
            if call.early:
                _launch_slopes(call, logits, target[rows], own, None, None, logits, vocabulary)
                sums.add(rows, logits[:, :vocabulary], x[rows])
        sums.finish()
        _launch_sum(call, losses, target, vocabulary, results)


def linear_backward(call: LinearCall, kept: Tensors, incoming, gradients: Tensors) -> None:
    """Fills the gradients: scales the early ones, or computes logits again."""
    x, vocabulary = as_rows(call.x), call.weight.shape[0]
    with on_device(x):
        if call.reduction != "none":
            scale = kept["scale"] if call.reduction == "mean" else None
            for name, gradient in gradients.items():
                _launch_scale(kept[f"d{name}"], incoming[0], scale, gradient)
            return
        target, dloss = _classes(call.target), incoming[0].reshape(-1)
        sums = _Sums(call, gradients)
        for rows, logits in _chunks_of_logits(call, x):
            own = tuple(x[rows] for x in _totals(kept))
            _launch_slopes(call, logits, target[rows], own, dloss[rows], None, logits, vocabulary)
            sums.add(rows, logits[:, :vocabulary], x[rows])
        sums.finish()


def _chunks_of_logits(call: LinearCall, x: torch.Tensor):
    """(tokens, their logits) of each chunk, in rows of one buffer which is padded so that vectors of 16 bytes fit."""
    vocabulary, buffer = call.weight.shape[0], None
    for rows in call.chunks():
        part = x[rows]
        if buffer is None:  # the first chunk is as large as any
            buffer = torch.empty(len(part), -(-vocabulary // 16) * 16, dtype=x.dtype, device=x.device)
        logits = buffer[: len(part)]
        if call.bias is None:
            torch.mm(part, call.weight.t(), out=logits[:, :vocabulary])
        else:
            torch.addmm(call.bias, part, call.weight.t(), out=logits[:, :vocabulary])
        yield rows, logits


class _Sums:
    """Gradients of x, weight and bias, from those of logits that come a chunk at a time.

    The product for weight adds to what is there, in float32 inside, and rounds at every chunk: a float32 sum would take
    twice the memory of the gradient beside it, and few roundings stay within twice those of one product
    (`problem._CHUNKS`).
    """

    def __init__(self, call: LinearCall, gradients: Tensors) -> None:
        self.weight, self.gradients = call.weight, gradients
        self.bias = torch.zeros_like(gradients["bias"], dtype=torch.float32) if "bias" in gradients else None
        self.first = True

    def add(self, rows: slice, slopes: torch.Tensor, x: torch.Tensor) -> None:
        if "x" in self.gradients:
            into = self.gradients["x"].view(-1, x.shape[1])[rows]
            torch.mm(slopes, self.weight, out=into)
        if "weight" in self.gradients:
            into = self.gradients["weight"]
            if into.dtype == x.dtype:
                torch.addmm(into, slopes.t(), x, beta=0.0 if self.first else 1.0, out=into)
            else:
                part = _wide_product(slopes.t(), x, into.dtype)
                into.copy_(part) if self.first else into.add_(part)
        if self.bias is not None:
            self.bias += slopes.sum(0, dtype=torch.float32)
        self.first = False

    def finish(self) -> None:
        if self.bias is not None:
            self.gradients["bias"].copy_(self.bias)


def _wide_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b in a wider dtype, which cuBLAS has for its sums."""
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else torch.mm(a.to(dtype), b.to(dtype))


# plans ---------------------------------------------------------------------------------------------------------------


def _launch_losses(call, logits: torch.Tensor, target, losses, totals, vocabulary: int) -> None:
    softcap = _softcap(call)
    key = _key(logits, target, losses, *totals)
    key = None if key is None else (key, vocabulary, call.ignore_index, call.label_smoothing > 0.0, softcap is None)
    plan = _PLANS.get(key)
    if plan is None:
        vector = 16 // logits.element_size()
        step = min(_STEP, max(vector, triton.next_power_of_2(logits.shape[1])))
        align = math.gcd(16, logits.shape[1], logits.stride(0))
        sizes = (vocabulary, logits.shape[1], call.ignore_index)
        constants = (call.label_smoothing > 0.0, softcap is not None, align, step // vector, vector)
        plan = Plan(token_losses, len(logits), (logits.stride(0),), sizes, constants, _warps(step), 1)
        _PLANS.put(key, plan)
    plan.launch((logits, target, losses, *totals), (), (call.label_smoothing, call.z_loss, softcap or 1.0))


def _launch_slopes(
    call, logits: torch.Tensor, target, totals, dloss, scale, into: torch.Tensor, vocabulary: int
) -> None:
    softcap = _softcap(call)
    key = _key(logits, target, *totals, dloss, scale, into)
    key = None if key is None else (key, vocabulary, call.ignore_index, softcap is None)
    plan = _PLANS.get(key)
    if plan is None:
        block = min(_BLOCK, triton.next_power_of_2(logits.shape[1]))
        blocks = -(-logits.shape[1] // block)
        strides = (logits.stride(0), into.stride(0), 0 if dloss is None else dloss.stride(0))
        sizes = (vocabulary, logits.shape[1], blocks, call.ignore_index)
        constants = (softcap is not None, math.gcd(16, logits.shape[1], *strides[:2]), block)
        plan = Plan(token_slopes, len(logits) * blocks, strides, sizes, constants, _warps(block), 1)
        _PLANS.put(key, plan)
    scalars = (call.label_smoothing, call.z_loss, softcap or 1.0)
    plan.launch((logits, target, *totals, dloss, scale, into), (), scalars)


def _launch_sum(call, losses, target, vocabulary: int, results: Tensors) -> None:
    """Loss and scale from the losses of all tokens, by one program so that bits repeat."""
    if call.reduction == "none":
        return
    mean = call.reduction == "mean"
    loss, scale = results["loss"], results["scale"] if mean else None
    key = _key(losses, target, loss, scale)
    key = None if key is None else (key, vocabulary, call.ignore_index)
    plan = _PLANS.get(key)
    if plan is None:
        sizes = (len(losses), vocabulary, call.ignore_index)
        plan = _PLANS.put(key, Plan(add_losses, 1, (), sizes, (mean, _TOKENS), 8, 1))
    plan.launch((losses, target, loss, scale), ())


def _launch_scale(x: torch.Tensor, dloss, scale, into: torch.Tensor) -> None:
    key = _key(x, dloss, scale, into)
    plan = _PLANS.get(key)
    if plan is None:
        programs = -(-x.numel() // _BLOCK)
        plan = _PLANS.put(key, Plan(scale_gradient, programs, (), (x.numel(),), (_BLOCK,), _warps(_BLOCK), 1))
    plan.launch((x, dloss, scale, into), ())


def _key(*tensors):
    """Everything that may change which kernel runs; None where a pointer would need a variant of its own."""
    key = tensors_key(*(x for x in tensors if x is not None))
    return None if key is None else (key, tuple(x is None for x in tensors))


def _warps(elements: int) -> int:
    return min(32, max(1, elements // (32 * _EACH)))


def _softcap(call) -> float | None:
    return call.softcap if isinstance(call, LinearCall) else None


def _totals(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each token, and the log of the sum of exponentials relative to it."""
    return tensors["top"], tensors["log_sum"]


def _losses_of(call, results: Tensors, target: torch.Tensor) -> torch.Tensor:
    """Where the losses of all tokens go."""
    if call.reduction == "none":
        return results["loss"].view(-1)
    return torch.empty(target.shape, dtype=torch.float32, device=target.device)


def _classes(target: torch.Tensor) -> torch.Tensor:
    return target.reshape(-1).contiguous()
