"""The facts of one call of `sample`, checked before any work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.readback import values_checked
from tilewise.core.real import is_finite
from tilewise.core.tensors import check_dense, hidden

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GREEDY_BELOW = 1e-5  # temperatures below are 0: logits divided by them could overflow
DOMAIN = 0x746F6B65  # third word of the Philox counter, so that no word of dropout's is drawn again
LARGEST_NOISE, LEAST_NOISE = 22.88, -2.82  # of the Gumbel variables that 32 bits make

_INTEGERS = (torch.int32, torch.int64)
Tensors = dict[str, torch.Tensor]


class Sampled(NamedTuple):
    """What `sample` returns for R rows; lists are None unless `logprobs` asks for them.

    Attributes:
        tokens: int64 (R,), -1 where a row has none.
        values: float32 (R,), the perturbed value that won, for `combine_shards`.
        logprobs: float32 (R,), the log probability of the token.
        top_tokens: int64 (R, n), the n most likely tokens, the lowest index first among equals.
        top_logprobs: float32 (R, n), their log probabilities.

    Example:
        >>> tw.sample(torch.tensor([[0.0, 2.0]]), temperature=0).tokens.tolist()
        [1]
    """

    tokens: torch.Tensor
    values: torch.Tensor
    logprobs: torch.Tensor
    top_tokens: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Penalties:
    """Penalties on tokens that a request has in its history, for `sample`.

    Args:
        history: int32 (requests, max_length), prompt and output tokens of each request. Entries from its length on, and
            tokens outside the vocabulary (padding, images), are ignored.
        prompt_lengths: int32 (requests,), the number of prompt tokens.
        lengths: int32 (requests,), the number of prompt and output tokens together.
        request: int32 (R,), the request of each row of logits; None: row r is request r.
        repetition: float32 (R,) or a number above 0; a positive logit of a token in prompt or output is divided by it,
            a negative one multiplied. None or 1 is off. Source: Keskar et al., "CTRL: A Conditional Transformer
            Language Model for Controllable Generation", 2019, as transformers' RepetitionPenaltyLogitsProcessor.
        presence: float32 (R,) or a number, subtracted from the logit of each token in the output. None or 0 is off.
        frequency: float32 (R,) or a number, subtracted once for each time that the token is in the output. None or 0
            is off. Source of both: OpenAI's API reference.

    Example:
        >>> history = torch.tensor([[4, 7, 1, 1]], dtype=torch.int32)
        >>> two, four = torch.tensor([[2], [4]], dtype=torch.int32)
        >>> penalties = tw.Penalties(history, two, four, presence=0.5, frequency=0.25)
        >>> logits = torch.tensor([[0.0, 3.0, 2.5]])
        >>> tw.sample(logits, temperature=0, penalties=penalties).tokens.tolist()
        [2]
    """

    history: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor
    request: torch.Tensor | None = None
    repetition: torch.Tensor | float | None = None
    presence: torch.Tensor | float | None = None
    frequency: torch.Tensor | float | None = None


@dataclass(eq=False, slots=True)
class Call:
    """One call; what is off is None. Implementations read this and nothing else.

    `logits` is (rows, vocabulary). By row: `repetition`, `presence`, `frequency`, `temperature`, `top_p`, `min_p`
    float32, `top_k` int32, `request` int32, `seeds` int64, `positions` int32 or int64. By request: `history`,
    `prompt_lengths`, `lengths`, int32. `bias_tokens` int32 and `bias_values` float32 are (rows, K), `allowed` is int32
    (masks, words) with the mask of each row in `mask_of`, int32. Tokens in `history` and `bias_tokens` count from 0,
    columns of `logits` from `first_token`. With `greedy` no row draws, and nothing that concerns drawing is there.
    """

    logits: torch.Tensor
    history: torch.Tensor | None = None
    prompt_lengths: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    request: torch.Tensor | None = None
    repetition: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    frequency: torch.Tensor | None = None
    bias_tokens: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None
    allowed: torch.Tensor | None = None
    mask_of: torch.Tensor | None = None
    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    greedy: bool = False
    first_token: int = 0
    top: int = -1  # most likely tokens that are listed, -1 for no lists
    processed: bool = False

    @property
    def truncates(self) -> bool:
        return not (self.top_k is None and self.top_p is None and self.min_p is None)


def results(call: Call) -> Tensors:
    """Empty ones, in the order of `Sampled`."""
    rows, device = call.logits.shape[0], call.logits.device
    found = {
        "tokens": torch.empty(rows, dtype=torch.int64, device=device),
        "values": torch.empty(rows, dtype=torch.float32, device=device),
        "logprobs": torch.empty(rows, dtype=torch.float32, device=device),
    }
    if call.top >= 0:
        found["top_tokens"] = torch.empty((rows, call.top), dtype=torch.int64, device=device)
        found["top_logprobs"] = torch.empty((rows, call.top), dtype=torch.float32, device=device)
    return found


def gradients(call: Call, kept: Tensors, wanted: Sequence[str]) -> Tensors:
    """None: a choice has no gradient."""
    return {}


# checks --------------------------------------------------------------------------------------------------------------


def make_call(
    logits: Any, penalties: Any, bias: Any, allowed: Any, by_row: dict[str, Any], first_token: Any, logprobs: Any,
    logprobs_of: Any,
) -> Call:  # fmt: skip
    """The call of `sample`; `by_row` are its arguments of one number a row. Raises InputError."""
    logits = _checked_logits(logits)
    width = logits.shape[1]
    if type(first_token) is not int or not 0 <= first_token < 2**31 - width:
        raise InputError(
            "first_token",
            got=shown(first_token),
            expected=f"an int from 0 to {2**31 - width - 1}",
            hint="the vocabulary index of the first column of logits",
        )
    if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= width):
        raise InputError(
            "logprobs",
            got=shown(logprobs),
            expected=f"None or an int from 0 to {width}, the columns of logits",
            hint="how many of the most likely tokens to list",
        )
    if logprobs_of not in ("raw", "processed"):
        raise InputError(
            "logprobs_of",
            got=shown(logprobs_of),
            expected="'raw' or 'processed'",
            hint="'raw' is the log softmax of logits as they are given",
        )
    call = Call(logits, first_token=first_token, processed=logprobs_of == "processed")
    call.top = -1 if logprobs is None else logprobs
    _set_penalties(call, penalties)
    _set_bias(call, bias)
    _set_allowed(call, allowed)
    _set_draw(call, by_row)
    return call


def _checked_logits(logits: Any) -> torch.Tensor:
    expected, hint = "a dense tensor (rows, vocabulary)", "one row of logits a token to choose"
    check_dense("logits", logits, expected, hint)
    if logits.ndim != 2 or not logits.shape[1]:
        raise InputError("logits", got=f"a tensor of shape {tuple(logits.shape)}", expected=expected, hint=hint)
    if logits.dtype not in DTYPES:
        raise InputError(
            "logits",
            got=str(logits.dtype),
            expected="float16, bfloat16 or float32",
            hint="convert it, for example with .float()",
        )
    found: torch.Tensor = logits.detach()
    return found


def _set_penalties(call: Call, given: Any) -> None:
    if given is None:
        return
    if not isinstance(given, Penalties):
        raise InputError(
            "penalties",
            got=type(given).__name__,
            expected="None or a tilewise.Penalties",
            hint="tw.Penalties(history, prompt_lengths, lengths, presence=0.5)",
        )
    rows = call.logits.shape[0]
    repetition = _by_row("repetition", given.repetition, call, low=0.0, low_hint="above 0; 1 is off", off=1.0)
    presence = _by_row("presence", given.presence, call, off=0.0)
    frequency = _by_row("frequency", given.frequency, call, off=0.0)
    history = _tensor("history", given.history, call, (None, None), (torch.int32,))
    requests, most = history.shape
    prompt = _tensor("prompt_lengths", given.prompt_lengths, call, (requests,), (torch.int32,))
    lengths = _tensor("lengths", given.lengths, call, (requests,), (torch.int32,))
    request = given.request
    if request is not None:
        request = _tensor("request", request, call, (rows,), (torch.int32,))
        _check_range("request", request, 0, requests - 1, "each row names a row of history")
    elif requests != rows:
        raise InputError(
            "history",
            got=f"shape {tuple(history.shape)}",
            expected=f"one row for each of the {rows} rows of logits",
            hint="request= says to which request each row belongs",
        )
    _check_range("lengths", lengths, 0, most, "history has so many columns")
    _check_range("prompt_lengths", prompt, 0, most, "history has so many columns")
    if values_checked(lengths.device) and not hidden(lengths) and bool((prompt > lengths).any()):
        raise InputError(
            "prompt_lengths",
            got="a prompt longer than its request",
            expected="prompt_lengths <= lengths",
            hint="lengths count prompt and output",
        )
    if repetition is None and presence is None and frequency is None:
        return
    call.history, call.prompt_lengths, call.lengths, call.request = history, prompt, lengths, request
    call.repetition, call.presence, call.frequency = repetition, presence, frequency


def _set_bias(call: Call, given: Any) -> None:
    if given is None:
        return
    tokens, values = _pair("bias", given, "(tokens, values), both (rows, K)")
    tokens = _tensor("bias tokens", tokens, call, (call.logits.shape[0], None), (torch.int32,))
    values = _tensor("bias values", values, call, tuple(tokens.shape), (torch.float32,))
    if values_checked(values.device) and not hidden(values) and not bool((values < math.inf).all()):
        raise InputError(
            "bias values", got="NaN or +inf", expected="numbers, or -inf for a ban", hint="allowed= keeps a set alone"
        )
    if tokens.numel():
        call.bias_tokens, call.bias_values = tokens, values


def _set_allowed(call: Call, given: Any) -> None:
    if given is None:
        return
    rows, width = call.logits.shape
    words = -(-width // 32)
    if isinstance(given, torch.Tensor):
        call.allowed = _tensor("allowed", given, call, (rows, words), (torch.int32,))
        return
    masks, mask_of = _pair("allowed", given, "masks (rows, words), or (masks, mask_of)")
    masks = _tensor("allowed masks", masks, call, (None, words), (torch.int32,))
    mask_of = _tensor("mask_of", mask_of, call, (rows,), (torch.int32,))
    _check_range("mask_of", mask_of, -(2**31), masks.shape[0] - 1, "a negative number allows every token")
    if masks.shape[0]:
        call.allowed, call.mask_of = masks, mask_of


def _set_draw(call: Call, given: dict[str, Any]) -> None:
    temperature = given["temperature"]
    off = 1.0 if not isinstance(temperature, torch.Tensor) else None
    found = _by_row("temperature", temperature, call, low=0.0, off=off, low_hint="0 or above; 0 is greedy", closed=True)
    call.greedy = not isinstance(temperature, torch.Tensor) and temperature is not None and temperature < GREEDY_BELOW
    top_k = _by_row("top_k", given["top_k"], call, low=0, high=2**31 - 1, off=0, integer=True, closed=True)
    top_p = _by_row("top_p", given["top_p"], call, low=0.0, high=1.0, off=1.0, closed=True)
    min_p = _by_row("min_p", given["min_p"], call, low=0.0, high=1.0, off=0.0, closed=True)
    seeds, positions = (_integers(name, given[name], call) for name in ("seeds", "positions"))
    if call.greedy:
        return
    call.temperature, call.top_k, call.top_p, call.min_p = found, top_k, top_p, min_p
    for name, x in (("seeds", seeds), ("positions", positions)):
        if x is None:
            raise InputError(
                name,
                got="None",
                expected="integers, one a row, where temperature is not 0",
                hint="temperature=0 draws nothing; equal seeds and positions draw the same noise",
            )
    call.seeds, call.positions = seeds, positions


def _integers(name: str, x: Any, call: Call) -> torch.Tensor | None:
    """Seeds, int64, or positions."""
    if isinstance(x, torch.Tensor):
        return _tensor(name, x, call, (call.logits.shape[0],), (torch.int64,) if name == "seeds" else _INTEGERS)
    return _by_row(name, x, call, low=-(2**63), high=2**63 - 1, integer=True, closed=True)


def _by_row(
    name: str, x: Any, call: Call, *, low: float = -math.inf, high: float = math.inf, off: float | None = None,
    integer: bool = False, closed: bool = False, low_hint: str = "",
) -> torch.Tensor | None:  # fmt: skip
    """One number a row, of a tensor or of one number for all; None where that number is `off`."""
    rows = call.logits.shape[0]
    if x is None:
        return None
    dtype = torch.int32 if integer else torch.float32
    least = f"{'at least' if closed else 'above'} {low:g}" if low > -math.inf else "finite"
    bounds = f"{least} and at most {high:g}" if high < math.inf else least
    hint = low_hint or (f"{off:g} is off" if off is not None else "one number a row, or one for all")
    if isinstance(x, torch.Tensor):
        found = _tensor(name, x, call, (rows,), (dtype,))
        if values_checked(found.device) and not hidden(found):
            good = found.isfinite() & ((found >= low) if closed else (found > low)) & (found <= high)
            if not bool(good.all()):
                bad = found[~good][0].item()
                raise InputError(name, got=f"a row with {bad}", expected=f"numbers, {bounds}", hint=hint)
        return found
    number = type(x) is int if integer else is_finite(x)
    if not number or not (low <= x if closed else low < x) or not x <= high:
        kind = "an int" if integer else "a number"
        expected = f"None, {dtype} ({rows},), or {kind} {bounds}"
        raise InputError(name, got=shown(x), expected=expected, hint=hint)
    if x == off:
        return None
    dtype = torch.int64 if integer and name != "top_k" else dtype
    return torch.full((rows,), x, dtype=dtype, device=call.logits.device)


def _pair(name: str, x: Any, expected: str) -> tuple[Any, Any]:
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        raise InputError(name, got=type(x).__name__, expected=expected, hint="see the docstring of tilewise.sample")
    return x[0], x[1]


def _tensor(
    name: str, x: Any, call: Call, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """x with unit stride in its last dimension, once its shape (None is any size), dtype and device are right."""
    sizes = "(" + ", ".join("any" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    expected = f"a dense {kinds} tensor of shape {sizes} on {call.logits.device}, the device of logits"
    check_dense(name, x, expected)
    if x.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, x.shape, strict=True)):
        raise InputError(
            name, got=f"shape {tuple(x.shape)}", expected=expected, hint="sizes follow from those of logits"
        )
    if x.dtype not in dtypes:
        raise InputError(name, got=str(x.dtype), expected=expected, hint=f"convert it: .to({dtypes[0]})")
    if x.device != call.logits.device:
        raise InputError(name, got=f"device {x.device}", expected=expected, hint="move it: .to(logits.device)")
    found: torch.Tensor = x.detach()
    return found if found.stride(-1) == 1 or found.shape[-1] < 2 else found.contiguous()


def _check_range(name: str, x: torch.Tensor, low: int, high: int, hint: str) -> None:
    if not values_checked(x.device) or hidden(x):
        return
    wrong = x[(x < low) | (x > high)]
    if wrong.numel():
        raise InputError(name, got=f"{int(wrong[0])}", expected=f"integers from {low} to {high}", hint=hint)
