"""FastVideo's attention over blocks of a video against its definition written out, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.adapters.dense import assert_close, dense, leaves
from tilewise.adapters.fastvideo import block_sparse_attn, video_sparse_attn
from tilewise.core.errors import InputError

SIZES_K, SIZES_Q = torch.tensor([8, 8, 3, 8, 1, 5]), torch.tensor([8, 2, 8, 7])
BLOCK = 8


def padded(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """x with zeros behind what each block has."""
    inside = (torch.arange(BLOCK) < sizes[:, None]).flatten()
    return (x.detach() * inside[:, None]).requires_grad_()


def inputs(heads_kv: int = 2) -> list[torch.Tensor]:
    q, k, v = leaves((2, 2, 32, 16), (2, heads_kv, 48, 16), (2, heads_kv, 48, 16))
    return [padded(q, SIZES_Q), padded(k, SIZES_K), padded(v, SIZES_K)]


def means(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Of each block's tokens, one block after another; zeros behind them take part in the gradient, as FastVideo's."""
    return torch.stack([x[:, :, n * BLOCK : (n + 1) * BLOCK].sum(2) / int(m) for n, m in enumerate(sizes)], 2)


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, topk: int, weight: torch.Tensor | None
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    of_q, of_k, of_v = means(q, SIZES_Q), means(k, SIZES_K), means(v, SIZES_K)
    coarse = dense(of_q, of_k, of_v)[0].repeat_interleave(BLOCK, 2)
    scores = of_q @ of_k.repeat_interleave(group, 1).mT
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(topk).indices, True)
    inside = (torch.arange(BLOCK) < SIZES_K[:, None]).flatten()
    seen = taken.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1) & inside
    return dense(q, k, v, seen)[0] + coarse * (1.0 if weight is None else weight)


@pytest.mark.parametrize(
    ("topk", "heads_kv", "gated", "block"), [(1, 2, True, BLOCK), (3, 1, False, (2, 2, 2)), (6, 2, True, [8])]
)
def test_means_and_the_best_blocks(topk: int, heads_kv: int, gated: bool, block: Any) -> None:
    q, k, v = inputs(heads_kv)
    (weight,) = leaves((2, 2, 32, 16), seed=5)
    given = [q, k, v, *([weight] if gated else [])]
    ours = video_sparse_attn(q, k, v, SIZES_K, SIZES_Q, topk, block, weight if gated else None)
    exact = [x.detach().double().requires_grad_() for x in given]
    want = written_out(exact[0], exact[1], exact[2], topk, exact[3] if gated else None)
    plain = written_out(q, k, v, topk, weight if gated else None)
    assert_close(ours, want, plain)
    do = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    truth = torch.autograd.grad(want, exact, do.double())
    rough = torch.autograd.grad(plain, given, do)
    for x, y, z in zip(torch.autograd.grad(ours, given, do), truth, rough, strict=True):
        assert_close(x, y, z)


def test_float64_is_float64_throughout() -> None:
    given = [x.detach().double().requires_grad_() for x in inputs()]
    (weight,) = leaves((2, 2, 32, 16), seed=5)
    ours = video_sparse_attn(given[0], given[1], given[2], SIZES_K, SIZES_Q, 3, BLOCK, weight)
    want = written_out(given[0], given[1], given[2], 3, weight.double())
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-13)
    do = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for x, y in zip(torch.autograd.grad(ours, given, do), torch.autograd.grad(want, given, do), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 32, 16), (2, 1, 32, 1), (16,), ()], ids=str)
def test_a_weight_in_more_bits_leaves_the_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in inputs())
    weight = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    found = video_sparse_attn(q, k, v, SIZES_K, SIZES_Q, 2, BLOCK, weight)
    assert found.dtype == dtype
    full = weight.detach().to(dtype).expand(found.shape)
    want, off = video_sparse_attn(q, k, v, SIZES_K, SIZES_Q, 2, BLOCK, full), 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.detach(), want, rtol=off, atol=off)
    (slope,) = torch.autograd.grad(found.float().sum(), weight)
    assert slope.dtype == torch.float64
    assert slope.shape == weight.shape
    assert slope.any()


def test_a_block_without_tokens_is_never_taken() -> None:
    q, k, v = (x.detach() for x in inputs())
    sizes = SIZES_K.clone()
    sizes[2] = 0
    k[:, :, 16:24], v[:, :, 16:24] = 0.0, 0.0
    rest = [x for x in range(6) if x != 2]
    without = [x.unflatten(2, (6, BLOCK))[:, :, rest].flatten(2, 3) for x in (k, v)]
    want = video_sparse_attn(q, *without, sizes[rest], SIZES_Q, 5, BLOCK)
    torch.testing.assert_close(video_sparse_attn(q, k, v, sizes, SIZES_Q, 6, BLOCK), want)


def test_a_map_of_blocks_and_its_lse() -> None:
    q, k, v = (x.detach() for x in inputs(1))
    taken = torch.rand(2, 2, 4, 6, generator=torch.Generator().manual_seed(1)) < 0.4
    taken[0, 0, 1] = False
    inside = (torch.arange(BLOCK) < SIZES_K[:, None]).flatten()
    seen = taken.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1) & inside
    out, lse = block_sparse_attn(q, k, v, taken, SIZES_K)
    want, want_lse, _ = dense(*(x.double() for x in (q, k, v)), seen)
    plain, plain_lse, _ = dense(q, k, v, seen)
    assert_close(out, want, plain)
    assert_close(lse, want_lse, plain_lse)
    assert (out[0, 0, 8:16] == 0).all()


Q, K = torch.zeros(1, 2, 32, 16), torch.zeros(1, 2, 48, 16)


def weighted(weight: Any) -> torch.Tensor:
    return video_sparse_attn(Q, K, K, SIZES_K, SIZES_Q, 2, 8, weight)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "many": (
        lambda: video_sparse_attn(Q, K, K, SIZES_K, SIZES_Q, 7, 8),
        "topk: got 7; expected an integer from 1 to 6",
    ),
    "block": (lambda: video_sparse_attn(Q, K, K, SIZES_K, SIZES_Q, 2, (4, 0)), "block_size: got (4, 0)"),
    "whole": (lambda: video_sparse_attn(Q, K, K, SIZES_K, SIZES_Q, 2, 9), "k: got seqlen 48; expected whole blocks"),
    "sizes": (lambda: video_sparse_attn(Q, K, K, SIZES_Q, SIZES_Q, 2, 8), "variable_block_sizes: got torch.int64 (4,)"),
    "sizes_q": (lambda: video_sparse_attn(Q, K, K, SIZES_K, [8] * 4, 2, 8), "q_variable_block_sizes: got [8"),  # type: ignore[arg-type]
    "negative": (
        lambda: video_sparse_attn(Q, K, K, SIZES_K - 2, SIZES_Q, 2, 8),
        "variable_block_sizes: got numbers from -1 to 6; expected 0 to 8",
    ),
    "large": (
        lambda: video_sparse_attn(Q, K, K, SIZES_K, SIZES_Q + 1, 2, 8),
        "q_variable_block_sizes: got numbers from 3 to 9; expected 0 to 8",
    ),
    "large_of_map": (
        lambda: block_sparse_attn(Q, K, K, torch.ones(1, 2, 4, 6).bool(), SIZES_K + 1),
        "variable_block_sizes: got numbers from 2 to 9",
    ),
    "weight": (lambda: weighted(torch.ones(1, 2, 48, 16)), "compress_attn_weight: got torch.float32 (1, 2, 48, 16)"),
    "weight_larger": (lambda: weighted(torch.ones(2, 2, 32, 16)), "compress_attn_weight: got torch.float32 (2, 2"),
    "weight_rank": (lambda: weighted(torch.ones(1, 1, 2, 32, 16)), "compress_attn_weight: got torch.float32 (1, 1"),
    "weight_bool": (lambda: weighted(torch.ones(1, 2, 32, 16).bool()), "compress_attn_weight: got torch.bool"),
    "weight_number": (lambda: weighted(0.5), "compress_attn_weight: got 0.5; expected a floating-point tensor (1, 2"),
    "rank": (lambda: video_sparse_attn(Q[0], K, K, SIZES_K, SIZES_Q, 2, 8), "q: got shape (2, 32, 16)"),
    "map": (lambda: block_sparse_attn(Q, K, K, torch.ones(1, 2, 4, 6), SIZES_K), "block_map: got torch.float32"),
    "map_shape": (
        lambda: block_sparse_attn(Q, K, K, torch.ones(1, 2, 3, 6).bool(), SIZES_K),
        "block_map: got torch.bo",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_is_named(name: str) -> None:
    make, said = BAD[name]
    with pytest.raises(InputError) as caught:
        make()
    assert said in str(caught.value)
    assert caught.value.hint


def test_every_block_is_attention_over_all_tokens() -> None:
    q, k, v = (x.detach() for x in leaves(*[(1, 2, 32, 16)] * 3))
    whole = torch.full((4,), BLOCK)
    found = video_sparse_attn(q, k, v, whole, whole, 4, BLOCK, torch.zeros(1, 2, 32, 16))
    torch.testing.assert_close(found.transpose(1, 2), tw.attention(*(x.transpose(1, 2) for x in (q, k, v))))
