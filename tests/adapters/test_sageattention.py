"""SageAttention's functions: the schemes that their arguments become, their layouts and lse, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.adapters.dense import dense, leaves
from tilewise.adapters import sageattention as sage
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.explain.accuracy import accuracy

Function = Callable[..., Any]
FUNCTIONS = [name for name in sage.__all__ if name != "sageattn_varlen"]
SAGE1 = tw.Sage1()
SAGE1_PLAIN = tw.Sage(pv="fp16", q_scale="block", k_scale="block", smooth=())
WARPS = {"q_scale": "warp", "k_scale": "block"}
# arguments of each function, and what they mean
SCHEMES: list[tuple[str, dict[str, Any], tw.Sage]] = [
    ("sageattn", {}, tw.Sage2()),
    ("sageattn", {"smooth_k": False}, tw.Sage(smooth=())),
    ("sageattn_qk_int8_pv_fp16_triton", {}, SAGE1),
    ("sageattn_qk_int8_pv_fp16_triton", {"quantization_backend": "cuda", "smooth_k": False}, SAGE1_PLAIN),
    ("sageattn_qk_int8_pv_fp16_cuda", {}, tw.Sage(pv="fp16")),
    ("sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": "fp16", "smooth_v": True},
     tw.Sage(pv="fp16", smooth=("k", "v"))),
    ("sageattn_qk_int8_pv_fp16_cuda", {"qk_quant_gran": "per_warp", "pv_accum_dtype": "fp16+fp32"},
     tw.Sage(pv="fp16", **WARPS)),
    ("sageattn_qk_int8_pv_fp8_cuda", {}, tw.Sage2pp()),
    ("sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32", "smooth_v": True}, tw.Sage(smooth=("k", "v"))),
    ("sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32+fp32", "qk_quant_gran": "per_warp"}, tw.Sage(**WARPS)),
    ("sageattn_qk_int8_pv_fp8_cuda_sm90", {}, tw.Sage2()),
    ("sageattn_qk_int8_pv_fp8_cuda_sm90", {"qk_quant_gran": "per_warp", "smooth_k": False},
     tw.Sage(smooth=(), **WARPS)),
]  # fmt: skip


def tensors(seqlen_q: int = 150, seqlen_k: int = 150, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k and v (2, heads, seqlen, dim); channels of keys and values are away from 0."""
    q, k, v = (x.detach() for x in leaves((2, 4, seqlen_q, 32), (2, 2, seqlen_k, 32), (2, 2, seqlen_k, 16)))
    shift = torch.randn(32, generator=torch.Generator().manual_seed(1)) * 4
    return [q.to(dtype), (k + shift).to(dtype), (v + shift[:16]).to(dtype)]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("name", "arguments", "scheme"), SCHEMES, ids=str)
def test_arguments_become_a_scheme(name: str, arguments: dict[str, Any], scheme: tw.Sage, layout: str) -> None:
    ours = tensors(dtype=torch.float16)
    given = ours if layout == "HND" else [x.transpose(1, 2).contiguous() for x in ours]
    o, lse = getattr(sage, name)(
        *given, tensor_layout=layout, is_causal=True, sm_scale=0.2, return_lse=True, **arguments
    )
    rows = [x.transpose(1, 2) for x in ours]
    want, want_lse = tw.attention_with_lse(*rows, mask=tw.causal, scale=0.2, quantize=scheme)
    assert torch.equal(o.transpose(1, 2) if layout == "HND" else o, want)
    assert torch.equal(lse, want_lse)
    alone = getattr(sage, name)(*given, tensor_layout=layout, is_causal=True, sm_scale=0.2, **arguments)
    assert torch.equal(alone, o)


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        (None, tw.Sage2()),
        ((8, 0), tw.Sage(pv="fp16")),
        ((8, 6), tw.Sage(pv="fp16")),
        ((8, 9), tw.Sage2pp()),
        ((9, 0), tw.Sage2()),
        ((10, 0), tw.Sage2()),
        ((12, 0), tw.Sage2pp()),
    ],
)
def test_sageattn_takes_what_the_gpu_is_fast_at(architecture: tuple[int, int] | None, scheme: tw.Sage) -> None:
    assert sage._scheme("per_thread", True, False, **sage._values_of(architecture)) == scheme


@pytest.mark.parametrize("sizes", [(150, 150), (40, 150), (150, 40)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_near_attention_written_out(name: str, causal: bool, sizes: tuple[int, int]) -> None:
    """Causal is top left; lse is of the scores before centring, in natural logarithms."""
    ours = tensors(*sizes)
    seen = torch.ones(sizes, dtype=torch.bool).tril() if causal else None
    want, want_lse, _ = dense(*(x.double() for x in ours), seen)
    o, lse = getattr(sage, name)(*ours, is_causal=causal, return_lse=True)
    found = accuracy(o.transpose(1, 2), want.transpose(1, 2))
    assert found.relative_l1 < (0.01 if "fp16" in name else 0.05)  # a weight of FP8 is off by up to 1 / 16
    assert lse.dtype == torch.float32
    assert float((lse - want_lse).abs().max()) < 0.05
    assert float(want_lse.abs().mean()) > 1.0, "a mean left out of lse would show"


def test_centring_matters() -> None:
    q, k, v = tensors()
    want = dense(q.double(), k.double(), v.double())[0].transpose(1, 2)

    def off(name: str, **arguments: Any) -> float:
        return accuracy(getattr(sage, name)(q, k, v, **arguments).transpose(1, 2), want).relative_l1

    name = "sageattn_qk_int8_pv_fp16_triton"
    assert off(name) < 0.5 * off(name, smooth_k=False)
    name = "sageattn_qk_int8_pv_fp8_cuda"
    assert off(name, smooth_v=True) < 0.5 * off(name)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 60, 90), (60, 90), (2, 1, 1, 90)], ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", ["sageattn", "sageattn_qk_int8_pv_fp16_triton"])
def test_attn_mask(name: str, layout: str, shape: tuple[int, ...], kind: torch.dtype) -> None:
    ours = tensors(60, 90)
    generator = torch.Generator().manual_seed(2)
    added = torch.randn(shape, generator=generator)
    attn_mask = added > 0 if kind == torch.bool else added
    given = ours if layout == "HND" else [x.transpose(1, 2) for x in ours]
    o = getattr(sage, name)(*given, tensor_layout=layout, attn_mask=attn_mask)
    wide = [x.double() for x in ours]
    want = dense(*wide, attn_mask)[0] if kind == torch.bool else dense(*wide, scores=lambda s: s + added)[0]
    want = want.transpose(1, 2)
    assert accuracy(o.transpose(1, 2) if layout == "HND" else o, want).relative_l1 < 0.05


LENGTHS_Q, LENGTHS_K = (5, 0, 140, 1, 30), (5, 9, 200, 64, 0)


@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_varlen_equals_each_sequence_alone(same: bool, causal: bool, smooth_k: bool) -> None:
    lengths = (LENGTHS_K, LENGTHS_K) if same else (LENGTHS_Q, LENGTHS_K)
    totals = sum(lengths[0]), sum(lengths[1])
    q, k, v = (x.detach() for x in leaves((totals[0], 4, 32), (totals[1], 2, 32), (totals[1], 2, 32)))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0) for n in lengths)  # int64, as torch.cumsum gives it
    cu_q = cu_k if same else cu_q.to(torch.int32)
    o = sage.sageattn_varlen(q, k, v, cu_q, cu_k, 0, 0, causal, 0.2, smooth_k)
    assert o.shape == q.shape
    parts = (torch.split(x, list(n)) for x, n in ((o, lengths[0]), (q, lengths[0]), (k, lengths[1]), (v, lengths[1])))
    options = {"tensor_layout": "NHD", "is_causal": causal, "sm_scale": 0.2, "smooth_k": smooth_k}
    for one, *rows in zip(*parts, strict=True):
        alone = sage.sageattn_qk_int8_pv_fp16_triton(*(x[None] for x in rows), **options)
        torch.testing.assert_close(one, alone[0], rtol=2.0**-10, atol=2.0**-12)  # weights of float16


def test_gradients_are_those_of_attention_in_few_bits() -> None:
    ours = [x.requires_grad_() for x in tensors()]
    found = torch.autograd.grad(sage.sageattn(*ours, is_causal=True).square().sum(), ours)
    rows = [x.transpose(1, 2) for x in ours]
    o = tw.attention(*rows, mask=tw.causal, quantize=tw.Sage2())
    for got, want in zip(found, torch.autograd.grad(o.square().sum(), ours), strict=True):
        assert torch.equal(got, want)
        assert float(got.abs().max()) > 0


# names and order of sageattention 2.2's sageattention/core.py
SIGNATURES = {
    "sageattn": "q k v tensor_layout is_causal sm_scale return_lse",
    "sageattn_varlen": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k is_causal sm_scale smooth_k",
    "sageattn_qk_int8_pv_fp16_triton": (
        "q k v tensor_layout quantization_backend is_causal attn_mask sm_scale smooth_k return_lse"
    ),
    "sageattn_qk_int8_pv_fp16_cuda": (
        "q k v tensor_layout is_causal qk_quant_gran sm_scale pv_accum_dtype smooth_k smooth_v return_lse"
    ),
    "sageattn_qk_int8_pv_fp8_cuda": (
        "q k v tensor_layout is_causal qk_quant_gran sm_scale pv_accum_dtype smooth_k smooth_v return_lse"
    ),
    "sageattn_qk_int8_pv_fp8_cuda_sm90": (
        "q k v tensor_layout is_causal qk_quant_gran sm_scale pv_accum_dtype smooth_k return_lse"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_sageattentions(name: str) -> None:
    parameters = inspect.signature(getattr(sage, name)).parameters.values()
    assert " ".join(x.name for x in parameters if x.kind != x.KEYWORD_ONLY) == SIGNATURES[name]
    defaults = {x.name: x.default for x in parameters}
    assert (defaults.get("tensor_layout", "HND"), defaults["is_causal"], defaults["sm_scale"]) == ("HND", False, None)
    assert defaults["smooth_k"] is True
    assert not defaults.get("smooth_v", False)
    assert not defaults.get("return_lse", False)
    sums = {"fp16_cuda": "fp32", "fp8_cuda": "fp32+fp16", "fp8_cuda_sm90": "fp32+fp32"}
    assert defaults.get("pv_accum_dtype") == sums.get(name.removeprefix("sageattn_qk_int8_pv_"))


@pytest.mark.parametrize("name", sage.__all__)
@pytest.mark.parametrize("keyword", ["scale", "dropout_p", "enable_gqa", "smooth_q"])
def test_unknown_keywords_are_named(name: str, keyword: str) -> None:
    lengths = [torch.tensor([0, 150])] * 2 + [150, 150] if name == "sageattn_varlen" else []
    given = [x[0].transpose(0, 1) for x in tensors()] if lengths else tensors()
    with pytest.raises(TypeError, match=keyword):
        getattr(sage, name)(*given, *lengths, **{keyword: 1})


def test_bad_input() -> None:
    q, k, v = tensors()
    cu = torch.tensor([0, 150], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    bad: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (InputError, "tensor_layout: got 'BHSD'", lambda: sage.sageattn(q, k, v, "BHSD")),
        (InputError, "qk_quant_gran", lambda: sage.sageattn_qk_int8_pv_fp8_cuda(q, k, v, qk_quant_gran="per_block")),
        (InputError, "pv_accum_dtype", lambda: sage.sageattn_qk_int8_pv_fp8_cuda(q, k, v, pv_accum_dtype="fp16")),
        (InputError, "pv_accum_dtype", lambda: sage.sageattn_qk_int8_pv_fp16_cuda(q, k, v, pv_accum_dtype="fp8")),
        (InputError, "pv_accum_dtype", lambda: sage.sageattn_qk_int8_pv_fp8_cuda_sm90(q, k, v, pv_accum_dtype=None)),
        (NotImplementedError, "fp32", lambda: sage.sageattn_qk_int8_pv_fp8_cuda_sm90(q, k, v, pv_accum_dtype="fp32")),
        (UnsupportedError, "fp32", lambda: sage.sageattn_qk_int8_pv_fp8_cuda_sm90(q, k, v, pv_accum_dtype="fp32")),
        (InputError, "quantization_backend", lambda: sage.sageattn_qk_int8_pv_fp16_triton(q, k, v, "HND", "cpu")),
        (InputError, "^attn_mask: got a mask with", lambda: sage.sageattn(
            q, k, v, is_causal=True, attn_mask=torch.ones(150, 150, dtype=torch.bool))),
        (InputError, "^attn_mask: got shape", lambda: sage.sageattn(q, k, v, attn_mask=torch.ones(3, 3))),
        (InputError, "^q: got shape", lambda: sage.sageattn(q[0], k, v)),
        (InputError, "^k: got list", lambda: sage.sageattn(q, [1], v)),
        (InputError, "^q: got list", lambda: sage.sageattn([1], k, v)),
        (InputError, "^q: got shape", lambda: sage.sageattn_varlen(q, k, v, cu, cu, 150, 150)),
        (InputError, "^cu_seqlens_k: got list", lambda: sage.sageattn_varlen(*packed, cu, [0, 150], 150, 150)),
        (InputError, "^cu_seqlens_q: got 4294967446 in", lambda: sage.sageattn_varlen(
            *packed, torch.tensor([0, 2**32 + 150]), cu, 150, 150)),
        (InputError, "^cu_seqlens_k: got torch.float32", lambda: sage.sageattn_varlen(
            *packed, cu, torch.tensor([0.0, 150.5]), 150, 150)),
        (InputError, "^cu_seqlens_k: got torch.int16", lambda: sage.sageattn_varlen(
            *packed, cu, cu.short(), 150, 150)),
        (InputError, "head_dim 300", lambda: sage.sageattn(*(torch.zeros(1, 1, 3, 300) for _ in range(3)))),
    ]  # fmt: skip
    for kind, name, call in bad:
        with pytest.raises(kind, match=name):
            call()


def test_any_memory() -> None:
    """Rows that are no rows in memory."""
    q, k, v = tensors()
    columns = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    assert torch.equal(sage.sageattn(*columns), sage.sageattn(q, k, v))


def test_it_compiles() -> None:
    torch._dynamo.reset()
    q, k, v = tensors()
    compiled = torch.compile(lambda *x: sage.sageattn(*x, is_causal=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), sage.sageattn(q, k, v, is_causal=True))
