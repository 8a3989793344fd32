"""The Triton kernel of `qkv_prologue`, each number within its bound of float64, and twins of it that must fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.interpret.test_twins import broken_copy
from tilewise.core.errors import UnsupportedError
from tilewise.ops import triton_launch
from tilewise.ops.qkv_prologue import QKVPrologue, triton_qkv_prologue
from tilewise.testing import qkv_prologue as cases
from tilewise.testing.properties import Setting
from tilewise.testing.qkv_prologue import BY_NAME, EPS, TRITON_CASES, PrologueCase, named

# the interpreter cuts off what bfloat16 has no bits for
SETTINGS = [Setting("triton", dtype) for dtype in (torch.float32, torch.float16)]


@pytest.mark.parametrize("case", TRITON_CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_equals_float64(setting: Setting, case: PrologueCase) -> None:
    cases.check(case, setting)


@pytest.mark.parametrize("case", TRITON_CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_agrees_with_apart(setting: Setting, case: PrologueCase) -> None:
    cases.agrees_with_apart(case, setting)


@pytest.mark.parametrize("elements", [1, 64, 4096])
def test_other_tiles(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_qkv_prologue, "_ELEMENTS", elements)
    for name in ("float32_norms", "int4", "odd"):
        cases.check(BY_NAME[name], SETTINGS[1])


def test_calls_of_other_kinds_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "remember", True)
    monkeypatch.setattr(triton_qkv_prologue, "_PLANS", triton_launch.Plans())
    plain = replace(BY_NAME["plain"], group=2)
    some = [
        replace(plain, norms=norms, pages=pages, interleaved=interleaved)
        for norms in ("", "own", "float32") for pages in ("plain", "int8") for interleaved in (False, True)
    ]  # fmt: skip
    more = [replace(plain, heads_kv=1, group=6), replace(plain, rotary_dim=8), replace(plain, tokens=3)]
    for case in (*some, *more, *some, *more):
        cases.check(case, SETTINGS[1])


def test_layers_share_an_object() -> None:
    case, setting = BY_NAME["norms"], SETTINGS[1]
    first = cases.make_inputs(case, setting, cases.make_memory(case, setting))
    shared = QKVPrologue(first.slots, rope=first.rope, eps=EPS, impl="triton")
    for seed in range(3):
        held, other = (cases.make_memory(case, setting) for _ in range(2))
        given = cases.make_inputs(replace(case, seed=seed), setting, held)
        given = given._replace(slots=first.slots, rope=first.rope)
        q = shared.run(given.qkv, held.k_pages, held.v_pages, **named(given.norms))
        assert torch.equal(q, cases.ours(given, other, "triton"))
        assert all(torch.equal(a, b) for a, b in zip(held.bits, other.bits, strict=True))


def test_what_it_cannot_run_says_why() -> None:
    with pytest.raises(UnsupportedError, match=r"expected no keys by channel \(got a ByChannel\)"):
        cases.check(BY_NAME["channels4"], SETTINGS[0])
    wide = PrologueCase("wide", 1, 1, 1, 1026, 8, page_size=1, num_pages=1)
    with pytest.raises(UnsupportedError, match=r"expected head dimensions up to 1024 \(got 1026\)"):
        cases.check(wide, SETTINGS[0])
    cases.check(replace(wide, head_dim=1024), SETTINGS[0])


ALL = PrologueCase("all", 28, skip=False)
TWINS = [  # all of them stay inside the tensors
    ("slot >= 0", "slot > 0", ALL),
    ("slot // PAGE, slot % PAGE, ", "slot // PAGE // 2, slot % PAGE, ", ALL),
    ("token < tokens", "token < tokens - 1", ALL),
    ("return token, row % HEADS,", "return token, row % HEADS * 0,", ALL),
    ("square / DIM + eps", "square / BLOCK + eps", BY_NAME["part"]),
    ("square / DIM + eps", "square / DIM + 1000.0 * eps", ALL),
    ("square += tl.sum(high * high, 1)", "square += tl.sum(low * low, 1)", BY_NAME["int4"]),
    ("WEIGHT, rstd, other, is_turned)", "WEIGHT, rstd, dim, is_turned)", ALL),
    ("-s, s), x)", "s, s), x)", ALL),
    ("other = dim ^ 1", "other = dim", BY_NAME["int4_odd_neighbours"]),
    ("x = x * rstd[:, None] * w", "x = (x * rstd[:, None]).to(tl.float16).to(tl.float32) * w", ALL),
    ("values = keys + tl.cast(stride_xh, tl.int64) * HEADS_KV", "values = keys", ALL),
    ("keys = QKV + tl.cast(stride_xh, tl.int64)", "keys = QKV + DIM", BY_NAME["float32_norms"]),
    ("SLOTS, K_NORM,", "SLOTS, Q_NORM,", ALL),
    ("head * stride_ph, VECTOR)\n    into", "head * DIM, VECTOR)\n    into", BY_NAME["part"]),
    ("codes_of(high, scale, ENCODING) << 4", "codes_of(k, scale, ENCODING) << 4", BY_NAME["int4"]),
    ("scales_of(k, high, ENCODING)", "scales_of(k, k, ENCODING)", BY_NAME["int4_plain"]),
    ("page * stride_sp + offset * stride_ss", "page * stride_sp + 0 * offset", BY_NAME["int8"]),
    ("offs + STEP, inside)", "offs, inside)", BY_NAME["int4_neighbours"]),
]


@pytest.mark.parametrize(("old", "new", "case"), TWINS)
def test_a_broken_twin_is_caught(
    old: str, new: str, case: PrologueCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.check(case, SETTINGS[1])  # whole, it passes
    copy = broken_copy(triton_qkv_prologue, old, new, tmp_path)
    monkeypatch.setattr(triton_qkv_prologue, "prepare_heads", copy.prepare_heads)
    with pytest.raises(AssertionError):
        cases.check(case, SETTINGS[1])
