"""What `qkv_prologue` refuses, each by the name of an argument, and that no page has changed then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.ops.qkv_prologue import QKVPrologue, qkv_prologue
from tilewise.quant import encode, encode_by_channel

X = torch.zeros(3, 10, 16)  # 6 heads of q, 2 of k and of v
POOL = torch.zeros(4, 4, 2, 16)
ROPE = tw.Rope(*tw.rope_tables(16, 20), torch.arange(3))
SLOTS, W = torch.arange(3), torch.ones(16)
CODES = encode(POOL, "int8")
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "qkv_list": ({"qkv": [1.0]}, "qkv", "list"),
    "qkv_sparse": ({"qkv": X.to_sparse()}, "qkv", "sparse"),
    "qkv_matrix": ({"qkv": X.flatten(1)}, "qkv", "(3, 160)"),
    "qkv_vector": ({"qkv": X[0, 0]}, "qkv", "(16,)"),
    "qkv_number": ({"qkv": torch.zeros(())}, "qkv", "()"),
    "qkv_vector_and_no_pages": ({"qkv": X[0, 0], "k_pages": 3.0}, "qkv", "(16,)"),
    "qkv_batch": ({"qkv": X[None]}, "qkv", "(1, 3, 10, 16)"),
    "qkv_double": ({"qkv": X.double()}, "qkv", "torch.float64"),
    "qkv_integers": ({"qkv": X.long()}, "qkv", "torch.int64"),
    "qkv_stride": ({"qkv": X.repeat_interleave(2, -1)[..., ::2]}, "qkv", "strides (320, 32, 2)"),
    "qkv_grad": ({"qkv": X.clone().requires_grad_()}, "qkv", "with a gradient"),
    "qkv_width": ({"qkv": X[..., :0]}, "qkv", "(3, 10, 0)"),
    "few_heads": ({"qkv": X[:, :4]}, "qkv", "(3, 4, 16), with k_pages (4, 4, 2, 16)"),
    "odd_heads": ({"qkv": X[:, :9]}, "qkv", "(3, 9, 16), with k_pages (4, 4, 2, 16)"),
    "k_pages_number": ({"k_pages": 3.0}, "k_pages", "float"),
    "k_pages_rank": ({"k_pages": POOL[0]}, "k_pages", "(4, 2, 16)"),
    "k_pages_dtype": ({"k_pages": POOL.half()}, "k_pages", "torch.float16"),
    "k_pages_device": ({"k_pages": POOL.to("meta")}, "k_pages", "on meta"),
    "k_pages_width": ({"k_pages": POOL[..., :8]}, "k_pages", "(4, 4, 2, 8)"),
    "k_pages_stride": ({"k_pages": POOL.repeat_interleave(2, -1)[..., ::2]}, "k_pages", "strides"),
    "k_pages_grad": ({"k_pages": POOL.clone().requires_grad_()}, "k_pages", "gradient"),
    "k_pages_heads": ({"k_pages": POOL[:, :, :0], "v_pages": POOL[:, :, :0]}, "k_pages", "(4, 4, 0, 16)"),
    "k_pages_empty": ({"k_pages": POOL[:, :0], "v_pages": POOL[:, :0]}, "k_pages", "pages of 0 tokens"),
    "v_pages_none": ({"v_pages": None}, "v_pages", "NoneType"),
    "v_pages_dtype": ({"v_pages": POOL.half()}, "v_pages", "torch.float16"),
    "v_pages_width": ({"v_pages": POOL[..., :8]}, "v_pages", "(4, 4, 2, 8)"),
    "v_pages_heads": ({"v_pages": POOL[:, :, :1]}, "v_pages", "(4, 4, 1, 16)"),
    "v_pages_same": ({"v_pages": POOL}, "v_pages", "memory of k_pages"),
    "one_encoded": ({"k_pages": CODES}, "v_pages", "Tensor"),
    "two_kinds": ({"k_pages": CODES, "v_pages": encode(POOL, "fp8")}, "v_pages", "fp8 on cpu"),
    "codes_width": ({"k_pages": encode(POOL[..., :8], "int8"), "v_pages": CODES}, "k_pages", "(4, 4, 2, 8)"),
    "channels_dtype": (
        {"k_pages": encode_by_channel(POOL.half(), 4), "v_pages": CODES}, "k_pages", "torch.float16",
    ),
    "slots_list": ({"slot_mapping": [0, 1, 2]}, "slot_mapping", "list"),
    "slots_number": ({"slot_mapping": SLOTS[:2]}, "slot_mapping", "(2,)"),
    "slots_dtype": ({"slot_mapping": SLOTS.short()}, "slot_mapping", "torch.int16"),
    "slots_far": ({"slot_mapping": SLOTS + 14}, "slot_mapping", "slot 16"),
    "slots_twice": ({"slot_mapping": SLOTS // 2}, "slot_mapping", "slot 0 twice"),
    "slots_of_codes": (
        {"k_pages": encode_by_channel(POOL, 4), "v_pages": CODES}, "slot_mapping", "slot 0, in a page of codes",
    ),
    "rope_none": ({"rope": None}, "rope", "None"),
    "rope_tuple": ({"rope": (1, 2)}, "rope", "tuple"),
    "rope_tokens": ({"rope": replace(ROPE, positions=torch.arange(4))}, "rope", "4 positions"),
    "rope_wide": ({"rope": tw.Rope(*tw.rope_tables(18, 20), torch.arange(3))}, "rope", "rotary_dim 18"),
    "rope_position": ({"rope": replace(ROPE, positions=torch.tensor([0, 20, 1]))}, "rope", "position 20"),
    "rope_position_unwritten": (
        {"slot_mapping": torch.tensor([0, -1, 1]), "rope": replace(ROPE, positions=torch.tensor([0, -1, 1]))},
        "rope", "position -1",
    ),
    "rope_grad": ({"rope": replace(ROPE, cos=ROPE.cos.clone().requires_grad_())}, "cos", "gradient"),
    "q_norm_alone": ({"q_norm": W}, "k_norm", "None"),
    "k_norm_alone": ({"k_norm": W}, "q_norm", "None"),
    "q_norm_list": ({"q_norm": [1.0], "k_norm": W}, "q_norm", "list"),
    "q_norm_shape": ({"q_norm": W[:8], "k_norm": W}, "q_norm", "(8,)"),
    "k_norm_heads": ({"q_norm": W, "k_norm": W[None]}, "k_norm", "(1, 16)"),
    "k_norm_dtype": ({"q_norm": W, "k_norm": W.half()}, "k_norm", "torch.float16"),
    "k_norm_device": ({"q_norm": W, "k_norm": W.to("meta")}, "k_norm", "meta"),
    "k_norm_stride": ({"q_norm": W, "k_norm": torch.ones(32)[::2]}, "k_norm", "torch.float32 (16,)"),
    "k_norm_grad": ({"q_norm": W, "k_norm": W.clone().requires_grad_()}, "k_norm", "with a gradient"),
    "eps_negative": ({"eps": -1e-6}, "eps", "-1e-06"),
    "eps_nan": ({"eps": float("nan")}, "eps", "nan"),
    "eps_bool": ({"eps": True}, "eps", "True"),
    "eps_word": ({"eps": "1e-6"}, "eps", "'1e-6'"),
    "impl": ({"impl": "nope"}, "impl", "'nope'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named_before_pages_change(name: str) -> None:
    changes, what, got = BAD[name]
    pages = {"k_pages": POOL, "v_pages": POOL.clone()}
    qkv = torch.ones(3, 10, 16)
    held = [x if isinstance(x, torch.Tensor) else getattr(x, "data", None) for x in (pages | changes).values()]
    before = [x.clone() if isinstance(x, torch.Tensor) else None for x in held]
    arguments = {"qkv": qkv, "slot_mapping": SLOTS, "rope": ROPE} | pages | changes
    with pytest.raises(InputError) as caught:
        qkv_prologue(**arguments)
    assert caught.value.name == what
    assert got in str(caught.value.got)
    assert all((caught.value.expected, caught.value.hint))
    for x, y in zip(held, before, strict=True):
        assert y is None or x.is_meta or torch.equal(x.to_dense() if x.is_sparse else x, y.to_dense())


@pytest.mark.parametrize("name", ["qkv_stride", "qkv_double", "qkv_grad", "few_heads", "q_norm_alone", "k_pages_width"])
def test_a_layer_of_other_tensors_is_checked(name: str) -> None:
    changes, what, _ = BAD[name]
    arguments = {"qkv": X, "k_pages": POOL.clone(), "v_pages": POOL.clone()}
    shared = QKVPrologue(SLOTS, rope=ROPE)
    shared.run(**arguments)
    with pytest.raises(InputError) as caught:
        shared.run(**(arguments | changes))
    assert caught.value.name == what


def test_weights_of_a_model_need_no_detach_without_gradients() -> None:
    norm = torch.nn.Parameter(W.clone())
    with torch.no_grad():
        found = qkv_prologue(X + 1.0, POOL.clone(), POOL.clone(), SLOTS, rope=ROPE, q_norm=norm, k_norm=norm)
    with torch.inference_mode():
        qkv = X + 1.0
        assert torch.equal(
            qkv_prologue(qkv, POOL.clone(), POOL.clone(), SLOTS, rope=ROPE, q_norm=norm, k_norm=norm), found
        )
    assert not found.requires_grad


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = (POOL.clone(), POOL.clone(), SLOTS)
    with pytest.raises(UnsupportedError, match=r"impl='triton'.*expected an NVIDIA GPU .*got cpu"):
        qkv_prologue(X, *arguments, rope=ROPE, impl="triton")
    with pytest.raises(UnsupportedError, match=r"qkv_prologue.*plain tensors"):
        torch.vmap(lambda x: qkv_prologue(x, *arguments, rope=ROPE))(X[None])
    with pytest.raises(UnsupportedError, match=r"qkv_prologue.*plain tensors"):
        torch.vmap(lambda w: qkv_prologue(X, *arguments, rope=ROPE, q_norm=w, k_norm=w))(W[None])
    far = [x.to("meta") for x in (X, POOL, POOL, SLOTS)]
    rope = tw.Rope(*(x.to("meta") for x in (ROPE.cos, ROPE.sin, ROPE.positions)))
    with pytest.raises(UnsupportedError, match=r"a call that PyTorch records.*rms_norm, rope and kv_write"):
        qkv_prologue(*far, rope=rope)
