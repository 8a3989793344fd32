"""What FlashInfer's calls have in common: their arguments checked, their masks and scores as formulas, one attention.

A `Planned` is all that a call keeps between plan and run. FlashInfer's log-sum-exp has base 2 and shape (tokens,
heads), tilewise's is natural, (heads, tokens); `finish` and `natural` convert.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

import tilewise as tw
from tilewise.adapters.axes import index
from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.core.flags import check_flags
from tilewise.core.readback import unreadable, values_checked
from tilewise.core.real import is_finite
from tilewise.core.tensors import as_int32
from tilewise.layouts import Packed, Paged

State = tuple[torch.Tensor, torch.Tensor]
Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLAGS = ("non_blocking", "disable_split_kv", "enable_pdl")  # of the keywords that signatures do not spell out
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, eq=False)
class Variant:
    """Which keys are visible, and what becomes of a score; `queries` and `keys` are lengths, (batch,) or plain."""

    heads: int
    device: torch.device
    scale: float
    causal: bool
    window_left: int
    soft_cap: float
    alibi: bool
    queries: torch.Tensor | int
    keys: torch.Tensor | int
    custom: tw.Mask | None = None

    @cached_property
    def mask(self) -> tw.Mask | None:
        """A custom mask replaces causality; the window holds with both."""
        causal = self.causal and self.custom is None
        if self.window_left < 0:
            return tw.causal if causal else self.custom
        window = tw.window(self.window_left + 1, 0 if causal else None)
        return window if self.custom is None else self.custom & window

    @cached_property
    def score(self) -> tw.Score | None:
        """ALiBi counts from the query's own index, as FlashInfer's does: s + slope * (j - index)."""
        if not self.alibi:
            return tw.softcap(self.soft_cap) if self.soft_cap else None
        shift: Any = self.keys - self.queries
        slopes, batched = alibi_slopes(self.heads, self.device), isinstance(shift, torch.Tensor)

        def biased(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + slopes[h] * (j - (i - (shift[b] if batched else shift)))

        return tw.score(biased, "alibi(slopes)")


@lru_cache(maxsize=64)
def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """float32 (heads,): 2 ** (-8 (h + 1) / n) for the n heads of the largest power of two, then those in between."""
    n = 1 << (heads.bit_length() - 1)
    exponents = [-8.0 * (h + 1) / n if h < n else -4.0 * (2 * (h - n) + 1) / n for h in range(heads)]
    return torch.tensor([2.0**x for x in exponents], dtype=torch.float32, device=device)


def variant_of(
    head_dim: int,
    heads: int,
    device: torch.device,
    *,
    causal: Any = False,
    pos_encoding_mode: Any = "NONE",
    window_left: Any = -1,
    logits_soft_cap: Any = None,
    sm_scale: Any = None,
    queries: torch.Tensor | int = 1,
    keys: torch.Tensor | int = 1,
    custom: tw.Mask | None = None,
) -> Variant:
    """The variant that FlashInfer's arguments describe."""
    check_flags(causal=causal)
    if pos_encoding_mode not in ("NONE", "ALIBI"):
        known = pos_encoding_mode == "ROPE_LLAMA"
        kind: type[InputError | UnsupportedError] = UnsupportedError if known else InputError
        hint = "rotate q and k before the call"
        raise kind("pos_encoding_mode", got=shown(pos_encoding_mode), expected="'NONE' or 'ALIBI'", hint=hint)
    soft_cap = 0.0 if logits_soft_cap is None else number("logits_soft_cap", logits_soft_cap)
    if soft_cap < 0:
        raise InputError("logits_soft_cap", got=soft_cap, expected="a number >= 0", hint="None and 0 turn it off")
    alibi = pos_encoding_mode == "ALIBI"
    if alibi and soft_cap:
        hint = "FlashInfer's kernels scale such scores twice; write it as tilewise.attention(score=...)"
        raise UnsupportedError("logits_soft_cap", got=f"{soft_cap} with ALIBI", expected="one of them", hint=hint)
    scale = head_dim**-0.5 if sm_scale is None else number("sm_scale", sm_scale)
    left = integer("window_left", window_left, None, "-1 is no limit")
    return Variant(heads, device, scale, causal, left, soft_cap, alibi, queries, keys, custom)


@dataclass(frozen=True, eq=False)
class Planned:
    """What a plan leaves for its runs; tensors stay on the device."""

    layout: Paged | Packed
    variant: Variant
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    page_size: int | None = None
    batch_invariant: bool = False


def attend(
    planned: Planned, variant: Variant, tensors: tuple[Any, Any, Any], scales: Sequence[Any] = (), sinks: Any = None
) -> State:
    """(o, lse) as tilewise has them, of q (tokens, heads, dim); `scales` multiply the scores."""
    q, k, v = tensors
    one_each = isinstance(planned.layout, Paged) and planned.layout.cu_seqlens_q is None
    expected = f"{planned.dtype} (tokens, {variant.heads}, {planned.head_dim}), as planned"
    kv = (planned.heads_kv, planned.head_dim), (planned.heads_kv, planned.head_dim_v)
    check("q", q, (None, variant.heads, planned.head_dim), planned.dtype, expected)
    for name, x, shape in zip("kv", (k, v), kv, strict=True):
        lead = (None,) if planned.page_size is None else (None, planned.page_size)
        rows = "(tokens" if planned.page_size is None else f"(pages, {planned.page_size}"
        check(name, x, (*lead, *shape), planned.dtype, f"{planned.dtype} {rows}, {shape[0]}, {shape[1]}), as planned")
    scale = variant.scale
    for name, factor in zip(("q_scale", "k_scale"), scales, strict=False):
        scale *= 1.0 if factor is None else number(name, factor)
    o, lse = tw.attention_with_lse(
        q[:, None] if one_each else q,
        k,
        v,
        mask=variant.mask,
        score=variant.score,
        sink=sinks,
        layout=planned.layout,
        scale=scale,
        batch_invariant=planned.batch_invariant,
    )
    return (o[:, 0], lse[..., 0].mT) if one_each else (o, lse)


def finish(state: State, v_scale: Any, out: Any, lse: Any, return_lse: bool) -> torch.Tensor | State:
    """FlashInfer's result of a state, written where the caller wants it."""
    check_flags(return_lse=return_lse)
    o, natural_lse = state
    o = o if v_scale is None else o * number("v_scale", v_scale)
    based = natural_lse.mT * LOG2_E
    results = []
    for name, target, x in (("out", out, o), ("lse", lse, based)):
        if target is not None:
            check(name, target, tuple(x.shape), x.dtype, f"{x.dtype} {tuple(x.shape)} on {x.device}")
            target.copy_(x)
        results.append(x if target is None else target)
    return (results[0], results[1]) if return_lse else results[0]


def natural(s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FlashInfer's log-sum-exp (..., heads) as tilewise's (heads, ...) for an output like v."""
    return (s.to(torch.float64 if v.dtype == torch.float64 else torch.float32) / LOG2_E).movedim(-1, 0)


def pool_of(cache: Any, kv_layout: str) -> tuple[Any, Any]:
    """k and v (pages, page_size, heads, dim) of a paged cache in either form and layout; nothing is copied."""
    forms = "one tensor (pages, 2, ...) of rank 5, or a tuple of two of rank 4"
    hint = "(page_size, heads, dim) is NHD, (heads, page_size, dim) is HND"
    if isinstance(cache, torch.Tensor):
        if cache.ndim != 5 or cache.shape[1] != 2:
            raise InputError("paged_kv_cache", got=f"shape {tuple(cache.shape)}", expected=forms, hint=hint)
        k, v = cache.unbind(1)
    else:
        pair = isinstance(cache, (tuple, list)) and len(cache) == 2
        if not pair or not all(isinstance(x, torch.Tensor) and x.ndim == 4 for x in cache):
            raise InputError("paged_kv_cache", got=type(cache).__name__, expected=forms, hint=hint)
        k, v = cache
    return (k, v) if kv_layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))


def page_lengths(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """int32 (batch,): tokens of each request, all pages but the last full; none without pages, as FlashInfer has it."""
    pages = indptr[1:] - indptr[:-1]
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).to(torch.int32)


Lengths = tuple[torch.Tensor, torch.Tensor]  # of each request: queries, keys


def custom_mask_of(
    mask: Any, packed: Any, lengths_of: Lengths, device: torch.device, known: Lengths | None
) -> tw.Mask | None:
    """The mask of flattened booleans, or of bits, little end first, each request from a whole byte; None for neither.

    As in FlashInfer the packed one is taken where both are given. Offsets are int64. How many entries there must be is
    compared where lengths can be read without waiting for a GPU: those that are `known`, on the CPU.
    """
    queries, keys = lengths_of
    if mask is None and packed is None:
        return None
    lengths = keys.long()
    sizes = queries.long() * lengths
    name, given, dtype = ("custom_mask", mask, torch.bool)
    if packed is not None:
        name, given, dtype = "packed_custom_mask", packed, torch.uint8
        sizes = (sizes + 7) // 8 * 8
    check(name, given, (None,), dtype, f"{dtype} of rank 1: the requests' (seqlen_q, seqlen_k) flattened, in turn")
    known = lengths_of if values_checked(device) and not unreadable(keys) else known
    if known is not None:
        pairs = known[0].long() * known[1].long()
        wanted = int((pairs if packed is None else (pairs + 7) // 8).sum())
        if given.shape[0] != wanted:
            expected = f"{wanted}: seqlen_q * seqlen_k of each request, one after another"
            hint = "one entry for each pair, none for padding; packed, each request is padded to whole bytes"
            raise InputError(name, got=f"{given.shape[0]} entries", expected=expected, hint=hint)
    bits = given.to(device)
    if packed is not None:
        bits = (bits[:, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).bool().flatten()
    last = bits.shape[0] - 1
    if last < 0:  # no pairs at all
        return None
    first = sizes.cumsum(0) - sizes - (keys - queries) * lengths  # of row i = 0 on the key axis

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return bits[(first[b] + i * lengths[b] + j).clamp(0, last)]

    return tw.mask(visible, name)


def indices_of(name: str, x: Any, device: torch.device, entries: int | None = None) -> torch.Tensor:
    """A copy of an index tensor as int32 on the device, which the caller's later changes do not reach; moved there
    without waiting.
    """
    expected = f"an integer tensor {'of rank 1' if entries is None else (entries,)}"
    if not isinstance(x, torch.Tensor):
        raise InputError(name, got=type(x).__name__, expected=expected, hint="torch.tensor(..., dtype=torch.int32)")
    if x.ndim != 1 or x.dtype not in (torch.int32, torch.int64) or entries not in (None, x.shape[0]):
        raise InputError(
            name, got=f"{x.dtype} {tuple(x.shape)}", expected=expected, hint="int32, one request after another"
        )
    # indices behind the last page may be anything
    found: torch.Tensor = as_int32(x) if name.endswith("indices") else index(name, x)
    return found.to(device, non_blocking=True, copy=found is x).contiguous()


def indptr_of(name: str, x: Any, device: torch.device, batch: int | None = None) -> torch.Tensor:
    """Running sums (batch + 1,); their values are checked where they can be read without waiting for a GPU."""
    found = indices_of(name, x, device, None if batch is None else batch + 1)
    wrong = x.shape[0] < 1
    if not wrong and x.device.type == "cpu":
        wrong = int(x[0]) != 0 or bool((x[1:] < x[:-1]).any())
    if wrong:
        hint = "torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)"
        raise InputError(name, got=x.tolist(), expected="running sums from 0, one more than requests", hint=hint)
    return found


def check(name: str, x: Any, shape: tuple[int | None, ...], dtype: torch.dtype, expected: str) -> None:
    """Raise InputError unless x is a tensor of this dtype and shape; None is any extent."""
    hint = "see FlashInfer's plan: heads, head_dim, page_size, q_data_type and kv_data_type"
    if not isinstance(x, torch.Tensor):
        raise InputError(name, got=type(x).__name__, expected=expected, hint=hint)
    fits = x.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, x.shape, strict=True))
    if not fits or x.dtype != dtype:
        raise InputError(name, got=f"{x.dtype} {tuple(x.shape)}", expected=expected, hint=hint)


def dtype_of(name: str, value: Any) -> torch.dtype:
    """A dtype by name or as PyTorch has it."""
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        raise InputError(name, got=shown(value), expected="a torch.dtype or its name", hint="'bfloat16'")
    if found not in DTYPES:
        hint = "keys and values of 8 bits and fewer are not offered"
        raise UnsupportedError(name, got=str(found), expected="float16, bfloat16, float32 or float64", hint=hint)
    return found


def same_dtype(q: Any, kv: Any, o: Any) -> torch.dtype:
    """The one dtype of queries, keys and output."""
    dtype = dtype_of("q_data_type", q)
    for name, value in (("kv_data_type", kv), ("o_data_type", o)):
        if value is not None and dtype_of(name, value) != dtype:
            hint = "q, keys, values and output share one dtype"
            raise UnsupportedError(name, got=str(value), expected=f"{dtype}, as q_data_type", hint=hint)
    return dtype


def heads_of(num_qo_heads: Any, num_kv_heads: Any, *head_dims: Any) -> None:
    """Raise InputError unless these are heads that fit each other, and head dimensions."""
    q, kv = (integer(n, x, 1, "heads") for n, x in (("num_qo_heads", num_qo_heads), ("num_kv_heads", num_kv_heads)))
    if q % kv:
        hint = "each key/value head serves num_qo_heads / num_kv_heads query heads"
        raise InputError("num_kv_heads", got=kv, expected=f"a divisor of num_qo_heads {q}", hint=hint)
    for dim in head_dims:
        if integer("head_dim", dim, 1, "1 to 512") > 512:
            raise InputError("head_dim", got=dim, expected="1 to 512", hint="split wide heads into several")


def layout_name(kv_layout: Any) -> str:
    """NHD or HND."""
    if kv_layout not in ("NHD", "HND"):
        hint = "(tokens, heads, dim) is NHD, (heads, tokens, dim) is HND"
        raise InputError("kv_layout", got=shown(kv_layout), expected="'NHD' or 'HND'", hint=hint)
    return str(kv_layout)


def integer(name: str, value: Any, least: int | None, hint: str) -> int:
    """A whole number."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):
        expected = "an integer" if least is None else f"an integer >= {least}"
        raise InputError(name, got=shown(value), expected=expected, hint=hint)
    return int(value)


def number(name: str, value: Any) -> float:
    """A finite number; a tensor would have to be read."""
    if isinstance(value, torch.Tensor):
        hint = "pass a number; a tensor would be read at every call"
        raise UnsupportedError(name, got="a tensor", expected="a number", hint=hint)
    if not is_finite(value):
        raise InputError(name, got=shown(value), expected="a finite number", hint="None is 1, or FlashInfer's default")
    return float(value)


def tail_of(where: str, given: dict[str, Any], *, steering: Sequence[str], refused: Sequence[str]) -> None:
    """Look at the keywords that a signature does not spell out: those that steer FlashInfer's own kernels change no
    result and are taken, those that ask for what is not offered are refused by name, others are errors.
    """
    for name, value in given.items():
        if name in FLAGS and value is not None:
            check_flags(**{name: value})
        if name in refused:
            refuse("not offered by this adapter", **{name: value})
        elif name not in steering:
            raise TypeError(f"{where}() got an unexpected keyword argument {name!r}")


def any_batch(options: dict[str, Any], layout_of_pages: bool, device: torch.device) -> bool:
    """Whether a plan asks that other requests do not change the bits of one: by `fixed_split_size`, in pages, or
    `disable_split_kv`. Which parts keys are divided into is tilewise's choice: `batch_invariant` says more.
    """
    size, never = options.get("fixed_split_size"), options.get("disable_split_kv")
    if size is not None and integer("fixed_split_size", size, -1, "pages of a part; None and -1 leave it open") == 0:
        raise InputError("fixed_split_size", got=0, expected="1 or more pages", hint="None and -1 leave it open")
    wanted = bool(never) or (size is not None and size > 0)
    if wanted and not layout_of_pages and device.type != "cpu":
        name = "disable_split_kv" if never else "fixed_split_size"
        hint = "bits that do not depend on the batch are offered over pages: BatchPrefillWithPagedKVCacheWrapper"
        raise UnsupportedError(name, got=shown(options[name]), expected="None over packed keys", hint=hint)
    return wanted


def refuse(hint: str, **values: Any) -> None:
    """Raise UnsupportedError for the first that is not None, 0 or empty."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, (int, float, tuple)) and not value):
            got = type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)
            raise UnsupportedError(name, got=got, expected="None", hint=hint)
