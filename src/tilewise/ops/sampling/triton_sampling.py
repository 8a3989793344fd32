"""Sampling on a GPU: programs of a part of a row each process logits and take the best perturbed one, and one program a
row joins what they found. Without bias, top-k, top-p and min-p processed logits are never written.

Penalties count a row's history into as many integers as the vocabulary has tokens, by atomic additions. Thresholds of
top-k and top-p come from `triton_thresholds`. Nothing is sorted, and the host waits for nothing.
"""

import torch
import triton
import triton.language as tl

from tilewise.ops.sampling.problem import DOMAIN, GREEDY_BELOW, Call
from tilewise.ops.sampling.triton_thresholds import find_thresholds, kept, ordered
from tilewise.ops.triton_launch import Plan, Plans, as_rows, on_device, tensors_key
from tilewise.tiles.arithmetic import LN2, LOG2E

_PART = 4096  # tokens of a program
_CHUNK = 8192  # tokens at a time, where one program goes through a row
_HISTORY = 1024  # tokens of a history that a program counts
_PLANS = Plans()
WORD = tl.constexpr(DOMAIN)
COLD = tl.constexpr(GREEDY_BELOW)
INFINITE = tl.constexpr(float("inf"))


# device functions ----------------------------------------------------------------------------------------------------


@triton.jit
def together(x, column):
    """A number and a column as one integer, int64: larger numbers are larger, and of equal ones the first column."""
    key = (ordered(x) ^ 0x80000000).to(tl.int32, bitcast=True).to(tl.int64)
    return (key << 32) | (0xFFFFFFFF - column.to(tl.int64))


@triton.jit
def number_of(both):
    """The number of `together`."""
    key = (both >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def column_of(both):
    """The column of `together`."""
    return 0xFFFFFFFF - (both & 0xFFFFFFFF)


@triton.jit
def coefficient(X, row, OFF: tl.constexpr):
    """A row's number, `OFF` without any."""
    return OFF if X is None else tl.load(X + row)


@triton.jit
def penalised(REPETITION, PRESENCE, FREQUENCY, row):
    """Whether a row has penalties at all."""
    changed = coefficient(REPETITION, row, 1.0) != 1.0
    changed = changed | (coefficient(PRESENCE, row, 0.0) != 0.0)
    return changed | (coefficient(FREQUENCY, row, 0.0) != 0.0)


@triton.jit
def processed(x, COUNTS, REPETITION, PRESENCE, FREQUENCY, ALLOWED, MASK_OF, row, column, inside, width, stride_a):
    """Logits x after penalties and masks, [n]"""
    y = tl.where(x == 0.0, 0.0, x)  # both zeros are equal
    if COUNTS is not None:
        with_any = penalised(REPETITION, PRESENCE, FREQUENCY, row)
        count = tl.load(COUNTS + row * width + column, mask=inside & with_any, other=0)
        output = (count >> 1).to(tl.float32)
        if REPETITION is not None:
            p = tl.load(REPETITION + row) + tl.zeros_like(y)
            y = tl.where(count != 0, tl.where(y > 0.0, tl.div_rn(y, p), y * p), y)
        if FREQUENCY is not None:
            y = y - tl.load(FREQUENCY + row) * output
        if PRESENCE is not None:
            y = y - tl.load(PRESENCE + row) * (output > 0.0).to(tl.float32)
    if ALLOWED is not None:
        mask = row
        if MASK_OF is not None:
            mask = tl.load(MASK_OF + row).to(tl.int64)
        word = tl.load(ALLOWED + tl.maximum(mask, 0) * stride_a + column // 32, mask=inside, other=0)
        y = tl.where((((word >> (column % 32)) & 1) == 1) | (mask < 0), y, float("-inf"))
    return y


@triton.jit
def gumbel(SEEDS, POSITIONS, row, group, PART: tl.constexpr):
    """Noise of the tokens of these groups of four, [PART]: `cpu_noise.gumbel` of its `words`."""
    position = tl.load(POSITIONS + row).to(tl.uint32)
    c1 = position + 0 * group
    c2 = tl.full([], WORD, tl.uint32) + 0 * c1
    w0, w1, w2, w3 = tl.philox(tl.load(SEEDS + row), group, c1, c2, 0 * c1)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(PART)
    distance = tl.minimum(words.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.9999999403953552)
    u = 1.0 - distance
    # -log(1 - distance): what u was rounded by divides out (Kahan's log1p)
    exponential = tl.where(u == 1.0, distance, -tl.log(u) * (distance / tl.where(u == 1.0, 1.0, 1.0 - u)))
    return -tl.log(exponential)


@triton.jit
def perturbed(z, draws, SEEDS, POSITIONS, row, column, first_token, PART: tl.constexpr):
    """z, with noise where the row draws."""
    if draws:
        group = (first_token + tl.min(column, 0)) // 4 + tl.arange(0, PART // 4)
        z += gumbel(SEEDS, POSITIONS, row, group, PART)
    return z


@triton.jit
def heat(TEMPERATURE, row, GREEDY: tl.constexpr):
    """(What logits are divided by, whether the row draws)"""
    t = coefficient(TEMPERATURE, row, 1.0) + 0.0
    draws = (t >= COLD) & (not GREEDY)
    return tl.where(draws, t, 1.0), draws


@triton.jit
def sum_part(MAXIMA, SUMS, at, x):
    """Writes the maximum of a part and the sum of its exponentials, NaN where a number is NaN or +inf."""
    top = tl.max(x, 0)
    total = tl.sum(tl.math.exp2((x - tl.where(top == float("-inf"), 0.0, top)) * LOG2E), 0)
    tl.store(MAXIMA + at, top)
    tl.store(SUMS + at, total)


@triton.jit
def log_probability(x, MAXIMA, SUMS, row, parts, BLOCK: tl.constexpr):
    """Of a row's logit x, from the largest logits and the sums of its parts."""
    n = tl.arange(0, BLOCK)
    top = tl.load(MAXIMA + row * parts + n, mask=n < parts, other=float("-inf"))
    total = tl.load(SUMS + row * parts + n, mask=n < parts, other=0.0)
    largest = tl.max(top, 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    return x - shift - tl.math.log2(tl.sum(total * tl.math.exp2((top - shift) * LOG2E), 0)) * LN2


@triton.jit
def take_best(
    y, TEMPERATURE, SEEDS, POSITIONS, BEST, Z_BEST, Z_MAXIMA, Z_SUMS, row, at, column, first_token,
    PART: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """Writes the best perturbed number of a part with its column; y is -inf where nothing is kept."""
    t, draws = heat(TEMPERATURE, row, GREEDY)
    z = tl.div_rn(y, t + tl.zeros_like(y))
    value = z
    if not GREEDY:
        value = perturbed(z, draws, SEEDS, POSITIONS, row, column, first_token, PART)
    both = together(value, column)
    best = tl.max(both, 0)
    tl.store(BEST + at, best)
    if Z_BEST is not None:
        tl.store(Z_BEST + at, tl.max(tl.where(both == best, z, float("-inf")), 0))
        sum_part(Z_MAXIMA, Z_SUMS, at, z)


@triton.jit
def columns_of(first_token, parts, PART: tl.constexpr):
    """(Row, part of this program, its columns): a part begins at a multiple of four of the whole vocabulary."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    return row, part, part * PART - first_token % 4 + tl.arange(0, PART)


# kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def clear_counts(COUNTS, REPETITION, PRESENCE, FREQUENCY, width, parts, PART: tl.constexpr):
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * PART + tl.arange(0, PART)
    with_any = penalised(REPETITION, PRESENCE, FREQUENCY, row)
    tl.store(COUNTS + row * width + column, tl.zeros([PART], tl.int32), mask=(column < width) & with_any)


@triton.jit
def count_tokens(
    HISTORY, PROMPT_LENGTHS, LENGTHS, REQUEST, COUNTS, REPETITION, PRESENCE, FREQUENCY, stride_h, width, first_token,
    chunks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds 2 for each output token, and sets the lowest bit for prompt tokens."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    n = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    request = row
    if REQUEST is not None:
        request = tl.load(REQUEST + row).to(tl.int64)
    with_any = penalised(REPETITION, PRESENCE, FREQUENCY, row)
    there = (n < tl.load(LENGTHS + request)) & with_any
    token = tl.load(HISTORY + request * stride_h + n, mask=there, other=-1)
    column = token - first_token
    there = there & (token >= first_token) & (column < width)
    output = n >= tl.load(PROMPT_LENGTHS + request)
    counts = COUNTS + row * width + column
    tl.atomic_add(counts, 2 + 0 * column, mask=there & output, sem="relaxed")
    tl.atomic_or(counts, 1 + 0 * column, mask=there & (output == 0), sem="relaxed")


@triton.jit
def process_parts(
    X, Y, COUNTS, REPETITION, PRESENCE, FREQUENCY, ALLOWED, MASK_OF, TEMPERATURE, SEEDS, POSITIONS, MAXIMA, SUMS, BEST,
    Z_BEST, Z_MAXIMA, Z_SUMS, stride_x, stride_a, width, first_token, parts,
    PART: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """Of a part of a row of logits: what its log-sum-exp needs, and processed logits written, or the best one."""
    row, part, column = columns_of(first_token, parts, PART)
    inside = (column >= 0) & (column < width)
    x = tl.load(X + row * stride_x + column, mask=inside, other=float("-inf")).to(tl.float32)
    at = row * parts + part
    sum_part(MAXIMA, SUMS, at, x)
    y = processed(x, COUNTS, REPETITION, PRESENCE, FREQUENCY, ALLOWED, MASK_OF, row, column, inside, width, stride_a)
    if Y is not None:
        tl.store(Y + row * width + column, y, mask=inside)
    else:
        take_best(
            y, TEMPERATURE, SEEDS, POSITIONS, BEST, Z_BEST, Z_MAXIMA, Z_SUMS, row, at, column, first_token, PART, GREEDY
        )


@triton.jit
def add_bias(Y, TOKENS, VALUES, stride_t, stride_v, width, count, first_token, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, count, BLOCK):
        n = start + tl.arange(0, BLOCK)
        token = tl.load(TOKENS + row * stride_t + n, mask=n < count, other=-1)
        value = tl.load(VALUES + row * stride_v + n, mask=n < count, other=0.0)
        column = token - first_token
        there = (token >= first_token) & (column < width)
        tl.atomic_add(Y + row * width + column, value, mask=there, sem="relaxed")


@triton.jit
def draw_parts(
    Y, TEMPERATURE, SEEDS, POSITIONS, MIN_P, LEAST, LAST, TOP, BEST, Z_BEST, Z_MAXIMA, Z_SUMS, width, first_token,
    parts, PART: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """The best perturbed number of a part of processed logits."""
    row, part, column = columns_of(first_token, parts, PART)
    inside = (column >= 0) & (column < width)
    y = tl.load(Y + row * width + column, mask=inside, other=float("-inf"))
    if LEAST is not None:
        y = kept(y, column, TEMPERATURE, MIN_P, LEAST, LAST, TOP, row)
    take_best(
        y, TEMPERATURE, SEEDS, POSITIONS, BEST, Z_BEST, Z_MAXIMA, Z_SUMS, row, row * parts + part, column, first_token,
        PART, GREEDY,
    )  # fmt: skip


@triton.jit
def join_parts(
    X, TOKENS, VALUES, LOGPROBS, MAXIMA, SUMS, BEST, Z_BEST, Z_MAXIMA, Z_SUMS, stride_x, width, first_token, parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of a row, its perturbed number and its log probability."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    both = tl.load(BEST + row * parts + n, mask=n < parts, other=-(2**63))
    best = tl.max(both, 0)
    value, column = number_of(best), column_of(best)
    failed = tl.sum(tl.load(SUMS + row * parts + n, mask=n < parts, other=0.0), 0)
    failed = (failed != failed) | ((value < INFINITE) == 0)
    none = failed | (value == float("-inf"))
    if Z_BEST is not None:
        chosen = tl.load(Z_BEST + row * parts + n, mask=(n < parts) & (both == best), other=float("-inf"))
        logprob = log_probability(tl.max(chosen, 0), Z_MAXIMA, Z_SUMS, row, parts, BLOCK)
    else:
        chosen = tl.load(X + row * stride_x + column, mask=none == 0, other=0.0).to(tl.float32)
        logprob = log_probability(chosen, MAXIMA, SUMS, row, parts, BLOCK)
    tl.store(TOKENS + row, tl.where(none, -1, column + first_token))
    tl.store(VALUES + row, tl.where(failed, float("nan"), value))
    tl.store(LOGPROBS + row, tl.where(none, float("nan"), logprob))


@triton.jit
def list_parts(
    X, Y, TEMPERATURE, MIN_P, LEAST, LAST, TOP, FOUND, stride_x, width, first_token, parts, each,
    PART: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """The `each` largest numbers of a part, with their columns: of logits X, or where there is a Y of those."""
    row, part, column = columns_of(first_token, parts, PART)
    inside = (column >= 0) & (column < width)
    if Y is not None:
        z = tl.load(Y + row * width + column, mask=inside, other=float("-inf"))
        if LEAST is not None:
            z = kept(z, column, TEMPERATURE, MIN_P, LEAST, LAST, TOP, row)
        t, _ = heat(TEMPERATURE, row, GREEDY)
        z = tl.div_rn(z, t + tl.zeros_like(z))
    else:
        z = tl.load(X + row * stride_x + column, mask=inside, other=float("-inf")).to(tl.float32)
    both = tl.where(inside, together(z, column), -(2**63))
    for n in range(each):
        best = tl.max(both, 0)
        tl.store(FOUND + (row * parts + part) * each + n, best)
        both = tl.where(both == best, -(2**63), both)


@triton.jit
def join_lists(
    FOUND, TOKENS, MAXIMA, SUMS, TOP_TOKENS, TOP_LOGPROBS, first_token, parts, count, top,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The `top` largest of a row, of `count` numbers that its parts have found."""
    row = tl.program_id(0).to(tl.int64)
    none = tl.load(TOKENS + row) < 0
    before = tl.full([], 2**63 - 1, tl.int64)
    for n in range(top):
        best = tl.full([], -(2**63), tl.int64)
        for start in range(0, count, BLOCK):
            i = start + tl.arange(0, BLOCK)
            both = tl.load(FOUND + row * count + i, mask=i < count, other=-(2**63))
            best = tl.maximum(best, tl.max(tl.where(both < before, both, -(2**63)), 0))
        before = best
        number = number_of(best)
        missing = none | (number == float("-inf"))
        tl.store(TOP_TOKENS + row * top + n, tl.where(missing, -1, column_of(best) + first_token))
        logprob = log_probability(number, MAXIMA, SUMS, row, parts, PARTS)
        tl.store(TOP_LOGPROBS + row * top + n, tl.where(none, float("nan"), logprob))


# launches ------------------------------------------------------------------------------------------------------------


def forward(call: Call, results: dict[str, torch.Tensor]) -> None:
    """Fills the results."""
    x = as_rows(call.logits)
    with on_device(x):
        _forward(call, x, results)


def _forward(call: Call, x: torch.Tensor, results: dict[str, torch.Tensor]) -> None:
    rows, width = x.shape
    first, draw = call.first_token, (call.temperature, call.seeds, call.positions)
    parts = -(-(width + first % 4) // _PART)
    part = min(_PART, max(16, triton.next_power_of_2(width + first % 4)))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    # a list of processed logits reads them, too
    stores = call.bias_tokens is not None or call.truncates or (call.processed and call.top > 0)
    y = empty(rows, width) if stores else None
    sums = (empty(rows, parts), empty(rows, parts))
    best = (
        empty(rows, parts, dtype=torch.int64),
        *((empty(rows, parts) if call.processed else None) for _ in range(3)),
    )
    penalties = (call.repetition, call.presence, call.frequency)
    counts = _counts(call, x, penalties)
    masks = (call.allowed, call.mask_of)
    stride_a = 0 if call.allowed is None else call.allowed.stride(0)
    sizes = (x.stride(0), stride_a, width, first, parts)
    pointers = (x, y, counts, *penalties, *masks, *draw, *sums, *best)
    warps = max(1, part // 512)
    # products and sums are rounded one by one, as on a CPU
    _run(process_parts, rows * parts, pointers, sizes, (part, call.greedy), warps, enable_fp_fusion=False)
    limits = (None, None, None)
    if y is not None:
        limits = _limits(call, y)
        pointers = (y, *draw, call.min_p, *limits, *best)
        _run(draw_parts, rows * parts, pointers, (width, first, parts), (part, call.greedy), warps)
    block = triton.next_power_of_2(parts)
    chosen = (results["tokens"], results["values"], results["logprobs"])
    _run(join_parts, rows, (x, *chosen, *sums, *best), (x.stride(0), width, first, parts), (block,), 1)
    if call.top > 0:
        each = min(call.top, part)
        found = empty(rows, parts, each, dtype=torch.int64)
        of = y if call.processed else None
        pointers = (x, of, call.temperature, call.min_p, *limits, found)
        sizes = (x.stride(0), width, first, parts, each)
        _run(list_parts, rows * parts, pointers, sizes, (part, call.greedy), warps)
        lists = (results["tokens"], *(best[2:] if call.processed else sums), *(results[n] for n in _LISTS))
        sizes = (first, parts, parts * each, call.top)
        _run(join_lists, rows, (found, *lists), sizes, (min(2048, triton.next_power_of_2(parts * each)), block), 4)


_LISTS = ("top_tokens", "top_logprobs")


def _counts(call: Call, x: torch.Tensor, penalties) -> torch.Tensor | None:
    """Of each row and token twice how often it is in the output, and 1 more where it is in the prompt."""
    if call.history is None:
        return None
    rows, width = x.shape
    counts = torch.empty(rows, width, dtype=torch.int32, device=x.device)
    parts, chunks = -(-width // _PART), -(-call.history.shape[1] // _HISTORY)
    _run(clear_counts, rows * parts, (counts, *penalties), (width, parts), (_PART,), 8)
    if chunks:
        pointers = (call.history, call.prompt_lengths, call.lengths, call.request, counts, *penalties)
        sizes = (call.history.stride(0), width, call.first_token, chunks)
        _run(count_tokens, rows * chunks, pointers, sizes, (_HISTORY,), 4)
    return counts


def _limits(call: Call, y: torch.Tensor):
    """Adds the bias to processed logits; then the least key that a row keeps, the last column of those with this key,
    and its largest logit.
    """
    rows, width = y.shape
    if call.bias_tokens is not None:
        tokens, values = call.bias_tokens, call.bias_values
        count = tokens.shape[1]
        sizes = (tokens.stride(0), values.stride(0), width, count, call.first_token)
        _run(add_bias, rows, (y, tokens, values), sizes, (min(1024, triton.next_power_of_2(count)),), 4)
    if not call.truncates:
        return None, None, None
    least, last = (torch.empty(rows, dtype=torch.int32, device=y.device) for _ in range(2))
    top = torch.empty(rows, dtype=torch.float32, device=y.device)
    chunk = min(_CHUNK, max(16, triton.next_power_of_2(width)))
    pointers = (y, call.temperature, call.top_k, call.top_p, least, last, top)
    _run(find_thresholds, rows, pointers, (width,), (chunk,), max(1, chunk // 512))
    return least, last, top


def _run(kernel, grid: int, pointers, sizes, constants, warps: int, **options) -> None:
    """Launches a kernel by its plan; tensors that are missing are None."""
    key = tensors_key(*(x for x in pointers if x is not None))
    if key is not None:
        key = (key, kernel.fn.__name__, tuple(x is None for x in pointers), sizes, constants)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.put(key, Plan(kernel, grid, (), sizes, constants, warps, 1, options=options))
    plan.launch(pointers, ())
