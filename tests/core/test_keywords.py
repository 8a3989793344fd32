"""Arguments that a function does not take: the error says what to write in their place, and that works."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.core.keywords import ELSEWHERE

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": tw.attention, "attention_with_lse": tw.attention_with_lse, "plan": tw.plan, "why": tw.why,
}  # fmt: skip
Q, K = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 1, 16)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)


def refused(function: Callable[..., Any], name: str, **more: Any) -> InputError:
    with pytest.raises(InputError) as error:
        function(Q, K, K, **more, **{name: True})
    assert error.value.name == name
    assert str(error.value.got).startswith("True, an argument that tilewise.")
    return error.value


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_of_other_libraries_are_answered_with_ours(function: str, name: str) -> None:
    error = refused(FUNCTIONS[function], name)
    ours = ELSEWHERE[name]
    assert error.hint.endswith(ours.write)
    assert error.hint.startswith("tilewise.attention has it") == (
        function == "plan" and ours.parameter not in inspect.signature(tw.plan).parameters
    )
    assert ours.parameter in inspect.signature(tw.attention).parameters


@pytest.mark.parametrize(
    ("name", "hint", "arguments"),
    [
        ("causal", "mask=tilewise.causal", {"mask": tw.causal}),
        ("is_causal", "mask=tilewise.causal", {"mask": tw.causal}),
        ("attn_mask", "mask=tilewise.explicit(keep)", {"mask": tw.explicit(torch.ones(8, 8, dtype=torch.bool))}),
        ("attn_mask", "score=tilewise.bias(values)", {"score": tw.bias(torch.zeros(8, 8))}),
        ("dropout_p", "dropout=", {"dropout": 0.5}),
        ("sinks", "sink= takes logits (num_heads_q,)", {"sink": torch.zeros(2)}),
        ("softmax_scale", "scale=", {"scale": 0.5}),
        ("window_size", "mask=tilewise.window(left + 1, right)", {"mask": tw.window(3, 2)}),
        ("window_left", "mask=tilewise.window(window_left + 1)", {"mask": tw.window(3 + 1)}),
        ("num_splits", "leave it out: the implementation decides, and impl= asks", {"impl": "cpu_tiled"}),
        ("kernel_options", "impl= asks for one by name", {"impl": "reference"}),
        ("tensor_layout", "leave it out: q, k and v are (batch, seqlen, heads, head_dim)", {}),
        ("alibi_slopes", "score=tilewise.alibi(slopes)", {"score": tw.alibi(torch.ones(2))}),
        ("softcap", "score=tilewise.softcap(cap)", {"score": tw.softcap(30.0)}),
        ("block_mask", "mask= takes functions (b, h, q_idx, kv_idx) -> bool", {"mask": lambda b, h, i, j: i >= j}),
        ("score_mod", "score= takes functions (score, b, h, q_idx, kv_idx)", {"score": lambda s, b, h, i, j: s + j}),
        ("enable_gqa", "num_heads_kv may be any divisor", {}),
        ("key_padding_mask", "mask=tilewise.lengths(seqlens)", {"mask": tw.lengths(torch.tensor([5]))}),
    ],
)
def test_what_a_hint_says_works(name: str, hint: str, arguments: dict[str, Any]) -> None:
    assert hint in refused(tw.attention, name).hint
    assert tw.attention(Q, K, K, **arguments).shape == Q.shape


def test_packed_lengths_are_answered_with_the_layout() -> None:
    assert "layout=tilewise.Packed(cu_seqlens_q" in refused(tw.attention, "cu_seqlens_q").hint
    assert tw.attention(Q[0], K[0], K[0], layout=tw.Packed(CU, CU, max_seqlen_q=5)).shape == Q.shape[1:]


def test_indptr_of_flashinfer_is_answered_with_both_layouts() -> None:
    hint = refused(tw.attention, "qo_indptr").hint
    assert "layout=tilewise.Packed(qo_indptr, kv_indptr)" in hint
    assert "tilewise.Paged(block_table, seqlens_k, qo_indptr)" in hint
    assert tw.attention(Q[0], K[0], K[0], layout=tw.Packed(CU, CU)).shape == Q.shape[1:]
    paged = tw.Paged(torch.zeros(2, 1, dtype=torch.int32), torch.tensor([4, 8], dtype=torch.int32), CU)
    assert tw.attention(Q[0], K, K, layout=paged).shape == Q.shape[1:]


def test_a_window_of_flashinfer_is_the_one_of_the_hint() -> None:
    from tilewise.adapters import flashinfer

    v = torch.arange(8.0).view(1, 8, 1, 1).expand(K.shape).contiguous()  # by position
    theirs = flashinfer.single_prefill_with_kv_cache(Q[0], K[0], v[0], causal=True, window_left=3)
    assert torch.allclose(theirs, tw.attention(Q, K, v, mask=tw.window(3 + 1))[0])


def test_weights_are_where_a_hint_says() -> None:
    from tilewise.adapters.flash_attn import flash_attn_func

    assert "flash_attn_func(..., return_attn_probs=True)" in refused(tw.attention, "return_attn_probs").hint
    *_, weights = flash_attn_func(Q, K, K, return_attn_probs=True)
    assert torch.allclose(weights.sum(-1), torch.ones(1, 2, 8))


def test_an_adapter_that_a_hint_names_exists() -> None:
    from tilewise.adapters.flex import flex_attention

    assert f"{flex_attention.__module__}.flex_attention" in refused(tw.attention, "block_mask").hint


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    assert refused(tw.attention, "scael").hint == "did you mean scale=?"
    assert refused(tw.plan, "batch_invarient").hint == "did you mean batch_invariant=?"
    assert refused(tw.attention, "xyzzy").hint == "help(tilewise.attention) describes each"
    assert refused(tw.plan, "dropout").hint == "tilewise.attention has dropout="
    assert refused(tw.quantize_qkv, "shceme", scheme=tw.Sage2()).hint == "did you mean scheme=?"
    with pytest.raises(InputError, match="expected one of q, k, select, mask") as error:
        tw.select_tiles(Q, K, tw.TopK(1), causal=True)  # type: ignore[arg-type]
    assert error.value.hint == "mask=tilewise.causal"


def test_the_signature_that_is_shown_has_the_parameters_alone() -> None:
    for function in (*FUNCTIONS.values(), tw.select_tiles, tw.quantize_qkv):
        shown = inspect.signature(function).parameters
        assert "unknown" not in shown
        caught = [x for x in shown.values() if x.kind is inspect.Parameter.VAR_KEYWORD]
        assert bool(caught) == (function is tw.why)
