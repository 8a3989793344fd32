"""FlashAttention-2's functions against attention written out in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.adapters.dense import as_double, as_leaves, assert_close, dense, leaves
from tilewise.adapters import flash_attn
from tilewise.core.errors import InputError, TilewiseError


def visible(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    """FlashAttention-2's rule: i + off - left <= j <= i + off + right, inclusive, -1 unlimited; causal is right 0."""
    place = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k)
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        seen &= j >= place - left
    if right >= 0:
        seen &= j <= place + right
    return seen


def scores(
    softcap: float, slopes: torch.Tensor | None, seqlen_q: int, seqlen_k: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Softcap, then ALiBi."""
    distance = (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)).abs()

    def apply(s: torch.Tensor) -> torch.Tensor:
        s = softcap * torch.tanh(s / softcap) if softcap else s
        if slopes is None:
            return s
        per_batch = slopes if slopes.ndim == 2 else slopes[None]
        return s - per_batch[:, :, None, None].to(s.dtype) * distance

    return apply


def dense_bshd(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) for (batch, seqlen, heads, dim), lse +inf where empty."""
    o, lse, _ = dense(*(x.transpose(1, 2) for x in tensors), *args, **kwargs)
    return o.transpose(1, 2), lse.masked_fill(lse == -torch.inf, torch.inf)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 3)},
    "left": {"window_size": (7, -1)},
    "right": {"window_size": (-1, 4)},
    "causal window": {"causal": True, "window_size": (9, 20)},
    "own key and the one before": {"causal": True, "window_size": (1, 0)},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi": 1, "causal": True},
    "alibi per batch, both sides": {"alibi": 2},
    "alibi, softcap, window": {"alibi": 1, "softcap": 2.0, "window_size": (11, 2)},
    "scale": {"softmax_scale": 0.3, "causal": True},
}
SIZES = ((37, 37), (19, 150), (150, 19))


def slopes_of(case: dict[str, Any], batch: int, heads: int) -> torch.Tensor | None:
    shape = {0: None, 1: (heads,), 2: (batch, heads)}[case.get("alibi", 0)]
    return None if shape is None else torch.linspace(0.05, 0.5, steps=shape[-1]).expand(shape).clone()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_dense_forward_and_backward(name: str, sizes: tuple[int, int]) -> None:
    case = dict(CASES[name])
    slopes, (seqlen_q, seqlen_k) = slopes_of(case, 2, 4), sizes
    case.pop("alibi", None)
    ours = leaves((2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 8))
    seen = visible(seqlen_q, seqlen_k, case.get("causal", False), case.get("window_size", (-1, -1)))
    change = scores(case.get("softcap", 0.0), slopes, seqlen_q, seqlen_k)
    o, lse, probs = flash_attn.flash_attn_func(*ours, alibi_slopes=slopes, return_attn_probs=True, **case)
    alone = flash_attn.flash_attn_func(*ours, alibi_slopes=slopes, **case)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(o, alone)
    assert lse.shape == (2, 4, seqlen_q)

    results = {}
    for kind, inputs in (("reference", as_double(ours)), ("plain", as_leaves(ours))):
        found = dense_bshd(inputs, seen, change, scale=case.get("softmax_scale"))
        results[kind] = (*found, *torch.autograd.grad(found[0].square().sum(), inputs))
    grads = torch.autograd.grad(o.square().sum(), ours)
    for what, x, reference, plain in zip(
        ("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), results["reference"], results["plain"], strict=True
    ):
        assert_close(x, reference, plain, what)
    expected = [dense(*(x.transpose(1, 2) for x in kind), seen, change, scale=case.get("softmax_scale"))[2]
                for kind in (as_double(ours), as_leaves(ours))]  # fmt: skip
    assert_close(probs, *expected, "S_dmask")


LENGTHS_Q, LENGTHS_K = (5, 0, 140, 1, 30), (5, 9, 20, 64, 0)


def cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("name", CASES)
def test_varlen_equals_each_sequence_alone(name: str) -> None:
    case = dict(CASES[name])
    slopes = slopes_of(case, len(LENGTHS_Q), 4)
    case.pop("alibi", None)
    ours = leaves((sum(LENGTHS_Q), 4, 16), (sum(LENGTHS_K), 2, 16), (sum(LENGTHS_K), 2, 16))
    lengths = (cumulative(LENGTHS_Q), cumulative(LENGTHS_K), max(LENGTHS_Q), torch.tensor(max(LENGTHS_K)))
    o, lse, probs = flash_attn.flash_attn_varlen_func(
        *ours, *lengths, alibi_slopes=slopes, return_attn_probs=True, **case
    )
    grads = torch.autograd.grad(o.square().sum(), ours)
    assert probs.shape == (5, 4, 140, 64)

    results = {}
    for kind, inputs in (("reference", as_double(ours)), ("plain", as_leaves(ours))):
        parts = []
        split = [x.split(lengths) for x, lengths in zip(inputs, (LENGTHS_Q, LENGTHS_K, LENGTHS_K), strict=True)]
        for b, sequence in enumerate(zip(*split, strict=True)):
            seqlen_q, seqlen_k = LENGTHS_Q[b], LENGTHS_K[b]
            seen = visible(seqlen_q, seqlen_k, case.get("causal", False), case.get("window_size", (-1, -1)))
            mine = slopes if slopes is None or slopes.ndim == 1 else slopes[b : b + 1]
            change = scores(case.get("softcap", 0.0), mine, seqlen_q, seqlen_k)
            parts.append(dense_bshd([x[None] for x in sequence], seen, change, scale=case.get("softmax_scale")))
        found = (torch.cat([o for o, _ in parts], 1)[0], torch.cat([lse for _, lse in parts], 2)[0])
        results[kind] = (*found, *torch.autograd.grad(found[0].square().sum(), inputs))
    for what, x, reference, plain in zip(
        ("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), results["reference"], results["plain"], strict=True
    ):
        assert_close(x, reference, plain, what)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("sizes", [(70, 70), (130, 40)], ids=str)
def test_dropout_follows_s_dmask(varlen: bool, sizes: tuple[int, int]) -> None:
    (seqlen_q, seqlen_k), drop = sizes, 0.3
    ours = leaves((2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 16))
    torch.manual_seed(5)
    if varlen:
        cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in sizes]
        flat = [x.flatten(0, 1) for x in ours]
        found = flash_attn.flash_attn_varlen_func(
            *flat, *cu, *sizes, dropout_p=drop, window_size=(60, 60), softcap=3.0, return_attn_probs=True
        )
        o, probs = found[0].unflatten(0, (2, seqlen_q)), found[2]
    else:
        o, _, probs = flash_attn.flash_attn_func(
            *ours, dropout_p=drop, window_size=(60, 60), softcap=3.0, return_attn_probs=True
        )
    keep = ~torch.signbit(probs)
    seen = visible(seqlen_q, seqlen_k, False, (60, 60))
    rate = float((~keep & seen).sum() / (2 * 4 * seen.sum()))
    assert abs(rate - drop) < 0.015  # about five standard deviations of the smaller case
    results = {}
    for kind, inputs in (("reference", as_double(ours)), ("plain", as_leaves(ours))):
        change = scores(3.0, None, seqlen_q, seqlen_k)
        out, _ = dense_bshd(inputs, seen, change, keep=keep, dropout=drop)
        results[kind] = (out, *torch.autograd.grad(out.square().sum(), inputs))
    grads = torch.autograd.grad(o.square().sum(), ours)
    for what, x, reference, plain in zip(
        ("o", "dq", "dk", "dv"), (o, *grads), results["reference"], results["plain"], strict=True
    ):
        assert_close(x, reference, plain, what)


def test_dropout_draws_from_the_generator() -> None:
    q, k, v = leaves((1, 40, 2, 8), (1, 40, 2, 8), (1, 40, 2, 8))
    torch.manual_seed(1)
    first, second = (flash_attn.flash_attn_func(q, k, v, 0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, flash_attn.flash_attn_func(q, k, v, 0.5))
    assert not torch.equal(first, second)


def test_packed_variants_equal_separate_tensors() -> None:
    qkv, kv, q = leaves((2, 33, 3, 4, 16), (2, 33, 2, 2, 16), (2, 33, 4, 16))
    options: dict[str, Any] = {"causal": True, "window_size": (8, 0), "softcap": 2.0}
    one = flash_attn.flash_attn_qkvpacked_func(qkv, **options)
    assert torch.equal(one, flash_attn.flash_attn_func(*qkv.unbind(2), **options))
    (grad,) = torch.autograd.grad(one.square().sum(), qkv)
    separate = as_leaves(list(qkv.unbind(2)))
    wanted = torch.autograd.grad(flash_attn.flash_attn_func(*separate, **options).square().sum(), separate)
    assert torch.equal(grad, torch.stack(wanted, 2))

    two = flash_attn.flash_attn_kvpacked_func(q, kv, **options)
    assert torch.equal(two, flash_attn.flash_attn_func(q, *kv.unbind(2), **options))
    cu = torch.tensor([0, 33, 66], dtype=torch.int32)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu, 33, **options)
    torch.testing.assert_close(packed.unflatten(0, (2, 33)), one, rtol=0, atol=1e-6)
    packed = flash_attn.flash_attn_varlen_kvpacked_func(q.flatten(0, 1), kv.flatten(0, 1), cu, cu, 33, 33, **options)
    torch.testing.assert_close(packed.unflatten(0, (2, 33)), two, rtol=0, atol=1e-6)


# names and order of FlashAttention-2 2.8's flash_attn/flash_attn_interface.py
TAIL = [
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "deterministic",
    "return_attn_probs",
]
CU = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *TAIL],
    "flash_attn_kvpacked_func": ["q", "kv", *TAIL],
    "flash_attn_qkvpacked_func": ["qkv", *TAIL],
    "flash_attn_varlen_func": ["q", "k", "v", *CU, *TAIL, "block_table"],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", *CU, *TAIL],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *TAIL],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attention_2s(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == SIGNATURES[name]
    defaults = [parameters[x].default for x in TAIL]
    assert defaults == [0.0, None, False, (-1, -1), 0.0, None, False, False]


def test_no_limit_and_any_memory() -> None:
    """None for no window and no softcap, as its newer versions spell it; rows that are no rows in memory."""
    q, k, v = (x.detach() for x in leaves((1, 8, 2, 8), (1, 8, 2, 8), (1, 8, 2, 8)))
    want = flash_attn.flash_attn_func(q, k, v)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=(None, None), softcap=None), want)
    columns = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    assert torch.equal(flash_attn.flash_attn_func(*columns), want)


def test_bad_input() -> None:
    q, k, v = (x.detach() for x in leaves((1, 8, 2, 8), (1, 8, 2, 8), (1, 8, 2, 8)))
    cu = torch.tensor([0, 8], dtype=torch.int32)
    bad: list[tuple[type[TilewiseError], str, Callable[[], Any]]] = [
        (InputError, "^k: got shape", lambda: flash_attn.flash_attn_varlen_func(
            q[0], k[0], v[0], cu, cu, 8, 8, block_table=torch.zeros(1, 1, dtype=torch.int32))),
        (InputError, "softcap", lambda: flash_attn.flash_attn_func(q, k, v, softcap=-1.0)),
        (InputError, "window_size", lambda: flash_attn.flash_attn_func(q, k, v, window_size=(1, 2, 3))),
        (InputError, "qkv", lambda: flash_attn.flash_attn_qkvpacked_func(torch.zeros(1, 8, 2, 2, 8))),
        (InputError, "kv", lambda: flash_attn.flash_attn_varlen_kvpacked_func(q[0], k[0], cu, cu, 8, 8)),
        (InputError, "window_size", lambda: flash_attn.flash_attn_func(q, k, v, window_size=4)),
        (InputError, "alibi_slopes", lambda: flash_attn.flash_attn_func(q, k, v, alibi_slopes=torch.rand(3))),
        (InputError, "max_seqlen_k", lambda: flash_attn.flash_attn_varlen_func(
            q[0], k[0], v[0], cu, cu, 8, 5, return_attn_probs=True)),
        (InputError, "^v: ", lambda: flash_attn.flash_attn_func(q, k, None)),
        (InputError, "^q: got shape", lambda: flash_attn.flash_attn_func(torch.randn(3), k, v)),
        (InputError, "^q: got list", lambda: flash_attn.flash_attn_func([1], k, v)),  # type: ignore[arg-type]
        (InputError, "^q: got a torch.sparse_coo", lambda: flash_attn.flash_attn_func(q.to_sparse(), k, v)),
        (InputError, "^q: got shape", lambda: flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 8, 8)),
        (InputError, "^cu_seqlens_q: got list", lambda: flash_attn.flash_attn_varlen_func(
            q[0], k[0], v[0], [0, 8], [0, 8], 8, 8)),
        (InputError, "^cu_seqlens_k: got shape", lambda: flash_attn.flash_attn_varlen_func(
            q[0], k[0], v[0], cu, cu[None], 8, 8)),
        (InputError, "^cu_seqlens: got list", lambda: flash_attn.flash_attn_varlen_qkvpacked_func(
            torch.zeros(8, 3, 2, 8), [0, 8], 8)),
        (InputError, "max_seqlen_q: got '8'", lambda: flash_attn.flash_attn_varlen_func(
            q[0], k[0], v[0], cu, cu, "8", 8, return_attn_probs=True)),
        (InputError, "^alibi_slopes: got list", lambda: flash_attn.flash_attn_func(q, k, v, alibi_slopes=[1.0])),
        (InputError, "^alibi_slopes: got torch.int64", lambda: flash_attn.flash_attn_func(
            q, k, v, alibi_slopes=torch.ones(2).long())),
        (InputError, "^alibi_slopes", lambda: flash_attn.flash_attn_func(q, k, v, alibi_slopes=torch.rand(2, 2))),
        (InputError, "^softcap: got 'x'", lambda: flash_attn.flash_attn_func(q, k, v, softcap="x")),
        (InputError, "^softcap: got nan", lambda: flash_attn.flash_attn_func(q, k, v, softcap=float("nan"))),
        (InputError, "dropout", lambda: flash_attn.flash_attn_func(q, k, v, dropout_p=1.0)),
    ]  # fmt: skip
    for kind, name, call in bad:
        with pytest.raises(kind, match=name) as caught:
            call()
        assert caught.value.hint


def test_slopes_that_are_a_parameter_compile_with_dynamic_sizes() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.rand(4, generator=torch.Generator().manual_seed(0)))

        def forward(self, q: torch.Tensor) -> Any:
            return flash_attn.flash_attn_func(q, q, q, alibi_slopes=self.slopes, causal=True)

    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((2, 40, 4, 16), (3, 48, 4, 16)):
        (q,) = leaves(shape)
        torch.testing.assert_close(compiled(q), layer(q))
