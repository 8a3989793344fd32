"""`attention(quantize=)` with codes that were made before: the same bits, rotary positions on the way, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.testing import attention_codes as cases
from tilewise.testing.attention_codes import CASES, CodedCase

BY_NAME = {case.name: case for case in CASES}
NAMES = ["sage2_causal", "sage1", "sage2_int4", "fa3", "softcap", "packed", "all_centred_packed", "value_blocks"]
MAKERS = {"cpu_codes": "cpu", "reference_codes": "reference"}  # of the codes that rows make for themselves
LARGE = CodedCase("large", tw.Sage2(), lengths=((256, 512),))


def rope_of(x: torch.Tensor) -> tw.Rope:
    angle = torch.rand(40, x.shape[-1] // 2, generator=torch.Generator().manual_seed(3)) * 6.28
    return tw.Rope(angle.cos(), angle.sin(), torch.arange(x.shape[:-2].numel()) % 40)


@pytest.mark.parametrize("name", NAMES)
def test_same_bits_as_codes_made_in_the_call(name: str) -> None:
    case = BY_NAME[name]
    (q, k, v), arguments = cases.make_inputs(case, torch.bfloat16)
    for impl, maker in MAKERS.items():
        codes = tw.quantize_qkv(q, k, v, scheme=case.scheme, layout=arguments.get("layout"), impl=maker)
        want = tw.attention_with_lse(q, k, v, quantize=case.scheme, impl=impl, **arguments)
        found = tw.attention_with_lse(q, k, v, quantize=codes, impl=impl, **arguments)
        assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("impl", MAKERS)
def test_rows_turned_on_the_way(impl: str, name: str) -> None:
    case = BY_NAME[name]
    (q, k, v), arguments = cases.make_inputs(case, torch.float32)
    ropes = (rope_of(q), rope_of(k))
    layout = arguments.get("layout")
    codes = tw.quantize_qkv(q, k, v, scheme=case.scheme, layout=layout, rope=ropes, impl=MAKERS[impl])
    found = tw.attention(q, k, v, quantize=codes, impl=impl, **arguments)
    turned = [tw.rope(x, rope=rope) for x, rope in zip((q, k), ropes, strict=True)]
    assert torch.equal(found, tw.attention(*turned, v, quantize=case.scheme, impl=impl, **arguments))


@pytest.mark.parametrize("select", [tw.Select(tw.TopK(2), block=(64, 128)), tw.Select(tw.window(70))], ids=str)
def test_tiles_of_turned_rows(select: tw.Select) -> None:
    (q, k, v), _ = cases.make_inputs(LARGE, torch.float32)
    ropes = (rope_of(q), rope_of(k))
    codes = tw.quantize_qkv(q, k, v, scheme=LARGE.scheme, rope=ropes, sums=True)
    found = tw.attention(q, k, v, quantize=codes, select=select)
    turned = [tw.rope(x, rope=rope) for x, rope in zip((q, k), ropes, strict=True)]
    torch.testing.assert_close(found, tw.attention(*turned, v, quantize=LARGE.scheme, select=select))


@pytest.mark.parametrize(
    ("sums", "select"),
    [
        (False, tw.Select(tw.TopK(2), block=(64, 128))),
        (True, tw.Select(tw.TopK(2), block=(32, 32))),
        (True, tw.Select(tw.window(70), far="summary")),
    ],
)
def test_means_of_rows_that_were_not_turned_are_refused(sums: bool, select: tw.Select) -> None:
    (q, k, v), _ = cases.make_inputs(LARGE, torch.float32)
    ropes = (rope_of(q), rope_of(k))
    turned = tw.quantize_qkv(q, k, v, scheme=LARGE.scheme, rope=ropes, sums=sums)
    with pytest.raises(InputError, match=r"^select: got .* rotated by quantize_qkv"):
        tw.attention(q, k, v, quantize=turned, select=select)
    plain = tw.quantize_qkv(q, k, v, scheme=LARGE.scheme, sums=sums)
    want = tw.attention(q, k, v, quantize=LARGE.scheme, select=select)
    torch.testing.assert_close(tw.attention(q, k, v, quantize=plain, select=select), want)


def test_refused() -> None:
    (q, k, v), _ = cases.make_inputs(LARGE, torch.float32)
    codes = tw.quantize_qkv(q, k, v, scheme=LARGE.scheme)
    wrong: list[tuple[Any, ...]] = [(q[:, 1:], k, v), (q, k[:, 1:], v[:, 1:]), (q, k, v[..., 1:].contiguous())]
    for given in wrong:
        with pytest.raises(InputError, match=r"^quantize: got codes of other tensors"):
            tw.attention(*given, quantize=codes)
    with pytest.raises(InputError, match=r"^quantize: got codes, and tensors that take a gradient"):
        tw.attention(q.clone().requires_grad_(), k, v, quantize=codes)
    with pytest.raises(InputError, match=r"^quantize: got codes inside torch\.compile"):
        torch.compile(lambda q: tw.attention(q, k, v, quantize=codes), backend="eager")(q)


def test_codes_of_other_sequences_are_refused() -> None:
    case = BY_NAME["packed"]
    (q, k, v), arguments = cases.make_inputs(case, torch.float32)
    layout = arguments["layout"]
    codes = tw.quantize_qkv(q, k, v, scheme=case.scheme, layout=layout)
    same = tw.Packed(layout.cu_seqlens_q.clone(), layout.cu_seqlens_k.clone())
    want = tw.attention(q, k, v, quantize=codes, layout=layout)
    assert torch.equal(tw.attention(q, k, v, quantize=codes, layout=same), want)
    moved = same.cu_seqlens_q.clone()
    moved[1] -= 1
    with pytest.raises(InputError, match=r"^quantize: got codes of other tensors"):
        tw.attention(q, k, v, quantize=codes, layout=tw.Packed(moved, same.cu_seqlens_k))
    with pytest.raises(InputError, match=r"^quantize: got codes of other tensors"):
        tw.attention(q[None], k[None], v[None], quantize=codes)


def test_lengths_that_changed_in_place_are_refused() -> None:
    q, k, v = torch.randn(3, 30, 2, 16)
    for keys in (None, torch.tensor([0, 20, 30], dtype=torch.int32)):
        layout = tw.Packed(torch.tensor([0, 20, 30], dtype=torch.int32), keys, max_seqlen_q=20)
        codes = tw.quantize_qkv(q, k, v, scheme=tw.Sage2(), layout=layout)
        assert isinstance(codes.layout, tw.Packed)
        assert codes.layout.bounds == layout.bounds
        want = tw.attention(q, k, v, quantize=codes, layout=layout)
        (layout.cu_seqlens_q if keys is None else keys)[1] = 10
        with pytest.raises(InputError, match=r"^quantize: got codes of other tensors"):
            tw.attention(q, k, v, quantize=codes, layout=layout)
        (layout.cu_seqlens_q if keys is None else keys)[1] = 20
        assert torch.equal(tw.attention(q, k, v, quantize=codes, layout=layout), want)
