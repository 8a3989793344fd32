"""Attention over codes in float64: what centring takes out is there again, exactly, in scores, o and lse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.ops.attention.reference_codes import attention_of_codes
from tilewise.quant import Quantized
from tilewise.quant.schemes import QUERIES
from tilewise.testing import quantize as cases
from tilewise.testing.quantize import RAGGED, QuantizeCase

FORMULAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": tw.causal},
    "window": {"mask": tw.window(9), "score": tw.softcap(20.0), "scale": 0.3},
    "sink": {"mask": tw.causal, "sink": torch.linspace(-1.0, 1.0, 4)},
}
SMOOTH = [(), ("k",), ("q",), ("v",), ("q", "k"), ("q", "k", "v")]
NEAR = 1e-5  # of float32 means and biases, of scores to 100


def exact(inputs: dict[str, Any], smooth: tuple[str, ...]) -> Quantized:
    """As `quantize_qkv` makes it, but that what is centred stays as it is: float64 in place of codes, scales of 1."""
    x = tw.quantize_qkv(**inputs, scheme=tw.Sage(pv="bf16", q_scale="block", k_scale="block", smooth=smooth))
    ones = {name: torch.ones_like(getattr(x, name)) for name in ("q_scale", "k_scale")}
    q, k, v = (inputs[name].double() for name in "qkv")
    if x.q_mean is not None:
        q = q - x.of_blocks(x.q_mean[..., None, :], "q", torch.float64)
    if x.k_mean is not None:
        k = k - x.of_sequences(x.k_mean, "k", torch.float64)
    if x.v_mean is not None:
        v = v - x.of_sequences(x.v_mean, "k", torch.float64)
    return replace(x, q=q, k=k, v=v, **ones)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("smooth", SMOOTH, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_centred_means_the_same(packed: bool, smooth: tuple[str, ...], formula: str) -> None:
    lengths = RAGGED if packed else ((130, 150),) * 2
    inputs = cases.make_inputs(QuantizeCase("", tw.Sage(), lengths, packed=packed), torch.float32)
    o, lse = attention_of_codes(exact(inputs, smooth), **FORMULAS[formula])
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    want_o, want_lse = tw.attention_with_lse(**wide, **FORMULAS[formula], impl="reference")
    assert (o.dtype, lse.dtype) == (torch.float64, torch.float64)
    torch.testing.assert_close(o, want_o, rtol=NEAR, atol=NEAR)
    torch.testing.assert_close(lse, want_lse, rtol=NEAR, atol=NEAR)


@pytest.mark.parametrize("missing", ["q_mean", "q_bias", "v_mean"])
def test_a_missing_term_would_show(missing: str) -> None:
    inputs = cases.make_inputs(QuantizeCase("", tw.Sage(), ((130, 150),)), torch.float32)
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    o, lse = attention_of_codes(replace(exact(inputs, ("q", "k", "v")), **{missing: None}))
    want_o, want_lse = tw.attention_with_lse(**wide, impl="reference")
    assert max(float((o - want_o).abs().max()), float((lse - want_lse).abs().max())) > 100 * NEAR


@pytest.mark.parametrize("scheme", [tw.FA3FP8(), tw.FP8("token", "block", "block"), tw.Sage(smooth=())], ids=str)
def test_codes_are_multiplied_as_they_are(scheme: cases.Scheme) -> None:
    inputs = cases.make_inputs(QuantizeCase("", scheme, ((70, 150),) * 2), torch.float16)
    x = tw.quantize_qkv(**inputs, scheme=scheme)
    found = attention_of_codes(x, mask=tw.causal)
    want = tw.attention_with_lse(*x.numbers(), mask=tw.causal, impl="reference")
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("keys", [0, 3])
def test_rows_that_see_no_key_have_no_mean(keys: int) -> None:
    inputs = cases.make_inputs(QuantizeCase("", tw.Sage(), ((5, keys),)), torch.float32)
    x = tw.quantize_qkv(**inputs, scheme=tw.Sage(smooth=("q", "k", "v")))
    o, lse = attention_of_codes(x, mask=tw.causal)  # the last query sees the last key
    assert not o[:, : 5 - keys].any()
    assert (lse[..., : 5 - keys] == -torch.inf).all()
    assert lse[..., 5 - keys :].isfinite().all()


def test_the_widest_heads() -> None:
    inputs = cases.make_inputs(QuantizeCase("", tw.Sage(), ((QUERIES, 5),), (1, 1), 256, 256), torch.bfloat16)
    o, _ = attention_of_codes(tw.quantize_qkv(**inputs, scheme=tw.Sage(smooth=("q", "k", "v"))))
    assert o.shape == (1, QUERIES, 1, 256)


def test_arguments_are_checked() -> None:
    inputs = cases.make_inputs(QuantizeCase("", tw.Sage()), torch.float32)
    with pytest.raises(InputError, match="sink: got float"):
        attention_of_codes(tw.quantize_qkv(**inputs, scheme=tw.Sage()), sink=1.0)
