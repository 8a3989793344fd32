"""Choices and plans are kept by all of a call: a field that changes, changes the key."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.layouts import LengthBounds, Pages
from tilewise.ops.attention import table
from tilewise.ops.attention.facts import facts
from tilewise.ops.attention.problem import Call, make_call, signature_of
from tilewise.quant.schemes import parse_scheme

X = torch.zeros(1, 8, 4, 16)
WIDE = torch.zeros(1, 8, 4, 32)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
BASE = make_call(X, X, X, mask=tw.causal, dropout=0.1, seed=0)
CODES = tw.quantize_qkv(X, X, X, scheme=tw.Sage2())
OTHERS: dict[str, Any] = {  # another value of each field
    "q": WIDE,
    "k": WIDE,
    "v": WIDE,
    "sink": torch.zeros(4),
    "mask": make_call(X, X, X, mask=tw.window(2)).mask,
    "score": make_call(X, X, X, score=tw.softcap(2.0)).score,
    "cu_seqlens_q": CU,
    "cu_seqlens_k": CU,
    "scale": -1.0,
    "dropout": 0.0,
    "seed": None,
    "deterministic": True,
    "wants_grad": True,
    "grad_sink": True,
    "grad_captured": (True,),
    "signature": signature_of(WIDE, WIDE, WIDE, None, None, False),
    "pages": Pages(torch.zeros(1, 2, dtype=torch.int32), None, torch.zeros(1, dtype=torch.int32)),
    "batch_invariant": True,
    "first_batch": 1,
    "scales": (X, X),
    "share_prefixes": True,
    "scheme": parse_scheme(tw.Sage1().text),
    "codes": CODES,
    "bounds": LengthBounds(3),
    "skip": torch.zeros(4),
}


def test_every_field_has_another_value() -> None:
    assert set(OTHERS) == {field.name for field in fields(Call)}


def signed(call: Call) -> Call:
    """With the signature of its tensors."""
    packed = call.cu_seqlens_q is not None
    q, k, v = (x[0] if packed else x for x in (call.q, call.k, call.v))
    return replace(call, signature=signature_of(q, k, v, call.mask, call.score, packed, call.pages, call.scales))


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_that_changes_changes_the_key(name: str) -> None:
    changed = replace(BASE, **{name: OTHERS[name]})
    assert facts(BASE) == facts(signed(BASE))
    assert facts(changed if name == "signature" else signed(changed)) != facts(BASE)


def test_values_that_kernels_are_given_change_nothing() -> None:
    assert facts(replace(BASE, scale=0.3, dropout=0.2, seed=torch.ones(1, dtype=torch.int64))) == facts(BASE)


def test_a_choice_is_not_taken_from_a_call_that_shares_prefixes() -> None:
    """Whose needs are others (a fault that was found in use)."""
    pool = tw.quant.encode(torch.zeros(4, 16, 2, 64), "int8")
    q = torch.zeros(2, 1, 4, 64)
    rows = []
    for share in (False, True, False):
        layout = tw.Paged(torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32), share_prefixes=share)
        call = make_call(q, pool, pool, layout=layout)
        rows.append(table.choose(call, None) is table._choose(call, None))
    assert all(rows)
