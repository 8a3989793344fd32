"""`qkv_prologue` on a GPU: the checks of the other tiers with layers of models, far pages, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tests.gpu.matrix import DEVICE
from tilewise.core.errors import InputError
from tilewise.ops.qkv_prologue import QKVPrologue, qkv_prologue
from tilewise.testing import qkv_prologue as cases
from tilewise.testing.graphs import captured
from tilewise.testing.properties import Setting
from tilewise.testing.qkv_prologue import BY_NAME, CASES, EPS, TRITON_CASES, PrologueCase, named

SETTINGS = [Setting("triton", dtype, DEVICE) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
LAYER = {"page_size": 16, "num_pages": 300}
LARGE = [
    PrologueCase("qwen3_decode", 64, 8, 4, 128, 128, **LAYER),
    PrologueCase("qwen3_prefill", 4000, 8, 2, 128, 128, norms="float32", **LAYER),
    PrologueCase("llama", 1000, 8, 4, 128, 128, norms="", **LAYER),
    PrologueCase("smollm", 333, 3, 3, 64, 64, norms="", memory="HND", gap=8, **LAYER),
    PrologueCase("part", 700, 4, 1, 96, 24, interleaved=True, memory="joint", **LAYER),
    PrologueCase("wide", 20, 2, 2, 576, 64, **LAYER),
    PrologueCase("widest", 20, 2, 2, 1024, 1024, **LAYER),
    *(PrologueCase(f"{kind}_prefill", 1500, 8, 4, 128, 128, pages=kind, **LAYER) for kind in ("int8", "fp8", "int4")),
    PrologueCase("int4_part", 300, 4, 3, 48, 32, pages="int4", norms="float32", memory="joint", gap=3, **LAYER),
]


@pytest.mark.parametrize("case", [*TRITON_CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_equals_float64(setting: Setting, case: PrologueCase) -> None:
    cases.check(case, setting)


@pytest.mark.parametrize("case", [*TRITON_CASES, *LARGE], ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_agrees_with_apart(setting: Setting, case: PrologueCase) -> None:
    cases.agrees_with_apart(case, setting)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_the_first_choice_and_apart(setting: Setting, case: PrologueCase) -> None:
    """Keys by channel go to `apart` unasked."""
    held, other = (cases.make_memory(case, setting) for _ in range(2))
    given = cases.make_inputs(case, setting, held)
    q = cases.ours(given, held, None)
    impl = "apart" if case.pages in cases.CHANNELS else "triton"
    assert torch.equal(q, cases.ours(given, other, impl))
    assert all(torch.equal(a, b) for a, b in zip(held.bits, other.bits, strict=True))
    cases.check(case, replace(setting, impl="apart"))


def test_calls_of_other_kinds_do_not_share_a_plan() -> None:
    plain = replace(BY_NAME["plain"], group=2)
    some = [
        replace(plain, norms=norms, pages=pages, interleaved=interleaved)
        for norms in ("", "own", "float32") for pages in ("plain", "int8") for interleaved in (False, True)
    ]  # fmt: skip
    more = [replace(plain, heads_kv=1, group=6), replace(plain, rotary_dim=8), replace(plain, tokens=3)]
    for case in (*some, *more, *some, *more):
        cases.check(case, SETTINGS[0])


@pytest.mark.parametrize("case", [BY_NAME["norms"], LARGE[1], LARGE[-2]], ids=repr)
def test_layers_share_an_object(case: PrologueCase) -> None:
    setting = SETTINGS[0]
    first = cases.make_inputs(case, setting, cases.make_memory(case, setting))
    shared = QKVPrologue(first.slots, rope=first.rope, eps=EPS)
    for seed in range(3):
        held, other = (cases.make_memory(case, setting) for _ in range(2))
        given = cases.make_inputs(replace(case, seed=seed), setting, held)
        given = given._replace(slots=first.slots, rope=first.rope)
        q = shared.run(given.qkv, held.k_pages, held.v_pages, **named(given.norms))
        assert torch.equal(q, cases.ours(given, other, "triton"))
        assert all(torch.equal(a, b) for a, b in zip(held.bits, other.bits, strict=True))


def test_bits_repeat() -> None:
    held = cases.make_memory(LARGE[1], SETTINGS[0])
    given = cases.make_inputs(LARGE[1], SETTINGS[0], held)
    found = []
    for _ in range(5):
        found.append((cases.ours(given, held, "triton"), *held.bits))
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("pages", ["plain", "int8"])
def test_a_graph_replays_with_other_slots_and_positions(pages: str) -> None:
    case, setting = replace(LARGE[0], pages=pages), SETTINGS[0]
    held, wanted = (cases.make_memory(case, setting) for _ in range(2))
    given = cases.make_inputs(case, setting, held)
    slots, positions = given.slots.clone(), given.rope.positions.clone()
    given.slots.fill_(-1)
    given.rope.positions.zero_()
    graph, q = captured(lambda: cases.ours(given, held, None))
    given.slots.copy_(slots)
    given.rope.positions.copy_(positions)
    graph.replay()
    assert torch.equal(q, cases.ours(given, wanted, "triton"))
    assert all(torch.equal(a, b) for a, b in zip(held.bits, wanted.bits, strict=True))


def test_the_host_waits_for_nothing() -> None:
    held = cases.make_memory(LARGE[0], SETTINGS[0])
    given = cases.make_inputs(LARGE[0], SETTINGS[0], held)
    shared = QKVPrologue(given.slots, rope=given.rope)
    arguments = (given.qkv, held.k_pages, held.v_pages)
    shared.run(*arguments, **named(given.norms))
    torch.cuda.set_sync_debug_mode("error")
    try:
        shared.run(*arguments, **named(given.norms))
        QKVPrologue(given.slots, rope=given.rope).run(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_values_are_checked_when_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is switched on between two runs, and by what has changed in place."""
    held = cases.make_memory(LARGE[0], SETTINGS[0])
    given = cases.make_inputs(LARGE[0], SETTINGS[0], held)
    shared = QKVPrologue(given.slots, rope=given.rope)
    arguments = (given.qkv, held.k_pages, held.v_pages)
    shared.run(*arguments)
    monkeypatch.setenv("TILEWISE_DEBUG", "1")
    shared.run(*arguments)
    given.slots[1] = LARGE[0].num_pages * LARGE[0].page_size
    with pytest.raises(InputError, match="slot_mapping: got slot 4800"):
        shared.run(*arguments)
    given.slots[1] = -1
    shared.run(*arguments)


def test_pages_behind_the_reach_of_32_bits() -> None:
    pages, page_size = 140_000, 16
    pool = [torch.zeros(pages, page_size, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    assert pool[0].numel() > 2**31
    qkv = torch.randn(page_size, 8 + 16, 128, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.arange((pages - 1) * page_size, pages * page_size, device=DEVICE)
    rope = tw.Rope(*(x.to(DEVICE) for x in tw.rope_tables(128, 16)), torch.arange(16, device=DEVICE))
    near = [torch.zeros(1, *x.shape[1:], device=DEVICE, dtype=x.dtype) for x in pool]
    q = qkv_prologue(qkv, *pool, slots, rope=rope, impl="triton")
    assert torch.equal(q, qkv_prologue(qkv, *near, slots % page_size, rope=rope, impl="triton"))
    for x, want in zip(pool, near, strict=True):
        assert torch.equal(x[-1], want[0])
        assert not x[-2].any()
        assert not x[:10].any()


def test_tokens_behind_the_reach_of_32_bits() -> None:
    tokens = 2**31 // (24 * 128) + 100
    qkv = torch.zeros(tokens, 24, 128, device=DEVICE, dtype=torch.bfloat16)
    qkv[-50:].normal_()
    pool = [torch.zeros(4, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    near = [torch.zeros_like(x) for x in pool]
    slots = torch.full((tokens,), -1, device=DEVICE)
    slots[-50:] = torch.arange(50, device=DEVICE)
    positions = torch.arange(tokens, device=DEVICE) % 100
    tables = [x.to(DEVICE) for x in tw.rope_tables(128, 100)]
    q = qkv_prologue(qkv, *pool, slots, rope=tw.Rope(*tables, positions), impl="triton")
    rope = tw.Rope(*tables, positions[-50:].clone())
    want = qkv_prologue(qkv[-50:], *near, slots[-50:].clone(), rope=rope, impl="triton")
    assert torch.equal(q[-50:], want)
    assert all(torch.equal(a, b) for a, b in zip(pool, near, strict=True))
