"""What the Hopper kernels owe to the order of their instructions, which the assembler may change."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import triton

import tilewise as tw
from tilewise.ops.attention import gluon_attention
from tilewise.ops.attention.problem import make_call
from tilewise.testing.offline import (
    compiling_for,
    exponentials_in_flight,
    in_loops,
    spilled_before_roles,
    spilled_in_loops,
)
from tools.kernel_resources import read_table
from tools.variants import FORMULAS, OF_TOKENS, Variant, variants

pytestmark = pytest.mark.rows("hopper")
VARIANTS = [variant for variant in variants() if variant.row == "hopper" and variant.quick]
BACKWARD = [
    v for v in VARIANTS if v.formula not in ("dropout", "left out", "pages", "small pages")
]  # which have the portable backward, or none
COLUMNS = 128  # keys of a tile: each of 128 threads has 64 * COLUMNS / 128 probabilities of it
FORWARD, PREPARE = "attention_fwd_sm90", "prepare"
OF_KEYS, OF_WIDE_KEYS, OF_QUERIES = "attention_bwd_sm90", "attention_bwd_wide_sm90", "attention_bwd_queries_sm90"
SPILLED_EARLY = {("dropout", FORWARD), ("causal", OF_QUERIES)}  # the latter the address of a count
NOT_CURED = {("dropout", FORWARD), *((name, OF_KEYS) for name in ("slopes", "softcap", "document"))}


@functools.cache
def _forward(variant: Variant) -> Any:
    """The kernel of its forward."""
    with torch.no_grad(), compiling_for(90) as kernels:
        gluon_attention.forward(variant.call())
    return kernels[-1]


@functools.cache
def _backward(variant: Variant) -> dict[str, Any]:
    """The kernels of its backward by name."""
    call = variant.call()
    o, lse = call.new_output(), call.new_lse()
    with compiling_for(90) as kernels:
        gluon_attention.backward(call, o, lse, torch.empty_like(o), None)
    return {kernel.metadata.name: kernel for kernel in kernels}


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.formula != "left out"], ids=str)
def test_exponentials_run_beside_products(variant: Variant) -> None:
    kernel = _forward(variant)
    columns = COLUMNS if variant.head_dim <= 128 else COLUMNS // 2
    beside = [count for count in exponentials_in_flight(kernel) if count >= 64 * columns // 128]
    assert len(beside) >= 2, "two warpgroups compute at least"
    assert "wgmma.mma_async" in kernel.asm["ptx"]


@pytest.mark.parametrize("variant", BACKWARD, ids=str)
def test_exponentials_of_the_backward_run_beside_products(variant: Variant) -> None:
    kernels = _backward(variant)
    wide, with_sums = variant.head_dim > 128, OF_QUERIES not in kernels
    assert (OF_WIDE_KEYS in kernels) is wide
    assert with_sums is not wide
    loops = 1 if variant.formula in ("plain", "longer") else 2  # tiles that the mask cuts, and the others
    others = {OF_KEYS: 64 if variant.head_dim > 64 else 128, OF_QUERIES: 64 if wide else 128}  # queries, or keys
    for name, columns in others.items():
        if name in kernels:
            beside = [count for count in exponentials_in_flight(kernels[name]) if count >= 64 * columns // 128]
            assert len(beside) >= 2 * loops, "each of two warpgroups takes them while dP is being computed"


@pytest.mark.parametrize("mask", [None, tw.window(100)], ids=["full", "window"])
@pytest.mark.parametrize("page_size", [16, 5])
def test_two_warpgroups_compute_over_pages(page_size: int, mask: Any) -> None:
    """A third would have tiles of its own, for which nobody fetches."""
    q = torch.zeros(9000, 4, 64, dtype=torch.bfloat16)
    pool = torch.zeros(10, page_size, 2, 64, dtype=torch.bfloat16)
    lengths = torch.tensor([0, 9000], dtype=torch.int32)
    layout = tw.Paged(torch.zeros(1, 9000 // page_size + 1, dtype=torch.int32), lengths[1:], lengths)
    call = make_call(q, pool, pool.clone(), layout=layout, mask=mask)
    assert gluon_attention.forward_plan(call, limited=False).constants[0].consumers == 2


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("lengths", "adds"), [([1000] * 4, True), ([60] * 9, True), ([9] * 900, False)])
def test_short_sequences_keep_no_sums(head_dim: int, lengths: list[int], adds: bool) -> None:
    """Sums of dQ are kept in whole tiles: of mostly empty ones they would fill the memory."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q, k, v = (torch.zeros(sum(lengths), 2, head_dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    call = make_call(q, k, v, layout=tw.Packed(cu_seqlens, cu_seqlens))
    with compiling_for(90):
        plans = gluon_attention.backward_plans(call, call.new_output(), call.new_output())
    assert (plans[2] is None) is adds


@pytest.mark.skipif(read_table()["triton"] != triton.__version__, reason="what spills is up to Triton's assembler")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_loops_over_tiles_spill_nothing(variant: Variant) -> None:
    """Shared memory leaves next to no cache, so an access to a spilled register goes as far as the L2 cache."""
    of_tiles = {FORWARD: _forward(variant)}
    if variant in BACKWARD:
        of_tiles |= {name: kernel for name, kernel in _backward(variant).items() if name.startswith("attention")}
    for name, kernel in of_tiles.items():
        spilled = spilled_in_loops(kernel)
        assert len(spilled) >= 2, "two warpgroups compute at least"
        assert not any(spilled) or (variant.formula, name) in NOT_CURED, f"{name}: {spilled}"
        assert bool(spilled_before_roles(kernel)) is ((variant.formula, name) in SPILLED_EARLY), name


@pytest.mark.skipif(read_table()["triton"] != triton.__version__, reason="later ones have all fence what they write")
@pytest.mark.parametrize("variant", BACKWARD, ids=str)
def test_who_adds_to_sums_of_dq_waits_for_no_addition(variant: Variant) -> None:
    """As a fence would, behind what it puts where products read it."""
    kernels = _backward(variant)
    if OF_KEYS in kernels:
        waits = in_loops(kernels[OF_KEYS], "MEMBAR")
        assert len(waits) >= 2, "two warpgroups compute at least"
        assert not any(waits)
    else:
        assert variant.head_dim > 128, "whose sums are of another kernel"


@pytest.mark.parametrize(
    ("head_dim", "lengths", "changed", "kernels"),
    [
        (64, (512, 512), {}, (OF_KEYS,)),
        (64, (16, 4096), {}, (OF_KEYS,)),
        (64, (8, 8), {}, (OF_KEYS, OF_QUERIES)),
        (128, (512, 512), {"mask": None}, (OF_KEYS, OF_QUERIES)),
        (128, (513, 513), {"mask": None}, (OF_KEYS,)),
        (128, (1024, 1024), {}, (OF_KEYS, OF_QUERIES)),
        (128, (512, 4096), {}, (OF_KEYS,)),
        (128, (1025, 1025), {}, (OF_KEYS,)),
        (128, (513, 513), {"deterministic": True, "mask": None}, (OF_KEYS,)),
        (128, (1024, 1024), {"deterministic": True}, (OF_KEYS, OF_QUERIES)),
        (128, (1025, 1025), {"deterministic": True}, (OF_KEYS,)),
        (64, (513, 513), {"deterministic": True, "mask": tw.window(64)}, (OF_KEYS, OF_QUERIES)),
        (128, (512, 512), {"score": tw.alibi(torch.ones(2, requires_grad=True))}, (OF_KEYS,)),
        (129, (513, 513), {}, (OF_WIDE_KEYS, OF_QUERIES)),
        (256, (513, 513), {"deterministic": True}, (OF_WIDE_KEYS, OF_QUERIES)),
    ],
)
def test_dq_has_sums_or_a_kernel_of_its_own(
    head_dim: int, lengths: tuple[int, int], changed: dict[str, Any], kernels: tuple[str, ...]
) -> None:
    rows = (lengths[0], lengths[1], lengths[1])
    q, k, v = (torch.zeros(1, n, 2, head_dim, dtype=torch.bfloat16, requires_grad=True) for n in rows)
    call = make_call(q, k, v, **{"mask": tw.causal, **changed})
    o = call.new_output()
    with compiling_for(90):
        plans = gluon_attention.backward_plans(call, o, torch.empty_like(o))
    assert tuple(plan.kernel.__name__ for plan in plans if plan is not None) == kernels


@pytest.mark.parametrize("deterministic", [False, True])
def test_fast_memory_makes_sums_of_more_calls_worth_it(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are as they are in any order."""
    q, k, v = (torch.zeros(1, 1024, 2, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    call = make_call(q, k, v, mask=tw.causal, deterministic=deterministic)
    monkeypatch.setattr(gluon_attention, "memory_rate", lambda device: 4.8e12)
    with compiling_for(90):
        _keys, _prepare, queries = gluon_attention.backward_plans(call, call.new_output(), call.new_output())
    assert (queries is not None) is deterministic


@pytest.mark.parametrize(("mask", "turns"), [(None, 1), (tw.causal, 33)])
@pytest.mark.parametrize(("batch", "some"), [(2, False), (128, True)])
def test_heads_share_memory_for_sums_in_whole_turns(
    mask: Any, turns: int, batch: int, some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head waits for the one that had its place, which must not be of the same turn: their items alternate."""
    q = torch.zeros(batch, 1024, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.zeros(batch, 1024, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    call = make_call(q, k, v, mask=mask)
    monkeypatch.setattr(gluon_attention, "multiprocessors", lambda device: 132)
    with compiling_for(90):
        keys, *_ = gluon_attention.backward_plans(call, call.new_output(), call.new_output())
    *_, found, _items, places = keys.sizes
    assert found == min(turns, 4 * batch)
    assert (places < 8 * batch) is some
    assert places == 8 * batch or places % (2 * turns) == 0


def test_what_other_programs_wrote_is_acquired() -> None:
    """An acquiring look whose outcome nobody uses would be left out."""
    kernel = _backward(Variant(90, "hopper", "bf16", 128, "causal"))[OF_KEYS]
    looks = re.findall(r"(?:ld|atom)\.global\.(?:gpu\.acquire|acquire\.gpu)", kernel.asm["ptx"])
    places, waits = 2, 2 + 1  # of the first run and of the next; for them, and for the runs of a head,
    assert len(looks) == places + waits + 1  # at which one looks before


def test_a_sum_of_a_tile_is_added_once() -> None:
    q, k, v = (torch.randn(1, 256, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2, requires_grad=True)
    call = make_call(q, k, v, mask=tw.causal, score=tw.alibi(slopes))
    o, lse = call.new_output(), call.new_lse()
    with compiling_for(90) as kernels:
        gluon_attention.backward(call, o, lse, torch.empty_like(o), None)
    kernel = next(kernel for kernel in kernels if kernel.metadata.name == OF_KEYS)
    steps = 3  # the first tile, those that the mask cuts, and the others, in each of two warpgroups
    added = re.findall(r"(?:atom|red)\.global\.gpu\.relaxed\.add\.f32", kernel.asm["ptx"])
    assert len(added) == 2 * steps


@pytest.mark.parametrize(
    ("formula", "seqlen", "dealt"),
    [("plain", 8192, False), ("window", 3072, False), ("window", 8192, True), ("causal", 3072, False),
     ("causal", 3200, True), ("causal", 2816, False), ("causal", 2048, True), ("window", 1152, True),
     ("causal", 1024, False), ("document", 1024, True), ("packed", 256, True)],
)  # fmt: skip
def test_items_are_dealt_out_where_they_are_many_or_uneven(
    formula: str, seqlen: int, dealt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon_attention, "multiprocessors", lambda device: 132)
    call = Variant(90, "hopper", "bf16", 128, formula).call()
    if seqlen != 256:
        q, k, v = (torch.zeros(2, seqlen, x.shape[2], 128, dtype=x.dtype) for x in (call.q, call.k, call.v))
        call = make_call(q, k, v, **(OF_TOKENS[formula](seqlen) if formula in OF_TOKENS else FORMULAS[formula]()))
    with compiling_for(90):
        plan = gluon_attention.forward_plan(call, limited=False)
    assert plan.constants[0].dealt.value is dealt


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "turns"), [(128, 512, 33), (256, 512, 33), (64, 512, 66), (128, 1024, 33), (128, 2560, 14)]
)
def test_pairs_fill_one_turn_of_the_grid_or_two(
    head_dim: int, seqlen: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon_attention, "multiprocessors", lambda device: 132)
    q, k, v = (torch.zeros(32, seqlen, 8, head_dim, dtype=torch.bfloat16) for _ in range(3))
    with compiling_for(90):
        plan = gluon_attention.forward_plan(make_call(q, k, v, mask=tw.causal), limited=False)
    assert plan.sizes[-2] == turns


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "outputs", "ahead"),
    [(64, 64, 3, 2), (128, 128, 2, 2), (256, 128, 2, 1), (256, 256, 1, 1)],
)
def test_outputs_have_memory_of_their_own(head_dim: int, head_dim_v: int, outputs: int, ahead: int) -> None:
    """Q of the next item is fetched while this one ends."""
    q, k = (torch.zeros(2, 1024, 4, head_dim, dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(2, 1024, 4, head_dim_v, dtype=torch.bfloat16)
    with compiling_for(90):
        fixed = gluon_attention.forward_plan(make_call(q, k, v), limited=False).constants[0]
    assert (fixed.outputs.value, fixed.ahead.value) == (outputs, ahead)


@pytest.mark.parametrize(("seqlen", "queries"), [(512, 128), (384, 192), (256, 128), (1024, 192)])
def test_short_rows_take_the_tiles_that_they_fill(seqlen: int, queries: int) -> None:
    q, k, v = (torch.zeros(2, seqlen, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    with compiling_for(90):
        plan = gluon_attention.forward_plan(make_call(q, k, v), limited=False)
    assert plan.constants[0].consumers.value * 64 == queries


@pytest.mark.parametrize(
    ("head_dim", "changed", "forward", "keys", "queries"),
    [
        (128, {}, True, True, None),
        (64, {}, True, False, None),
        (256, {}, True, True, True),
        (128, {"deterministic": True}, True, False, None),  # who waits for others' additions cannot keep step
        (128, {"score": tw.softcap(30.0)}, True, True, None),
        (128, {"mask": tw.causal}, False, False, None),
        (128, {"mask": tw.window(1024)}, False, False, None),
        (128, {"seqlen": 1024}, False, False, None),
    ],
    ids=str,
)
def test_programs_meet_where_all_visit_the_same(
    head_dim: int, changed: dict[str, Any], forward: bool, keys: bool, queries: bool | None
) -> None:
    arguments = {"seqlen": 8192, **changed}
    rows = (1, arguments.pop("seqlen"), 2, head_dim)
    q, k, v = (torch.zeros(rows, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    call = make_call(q, k, v, **arguments)
    o = call.new_output()
    with compiling_for(90):
        of_keys, _, of_queries = gluon_attention.backward_plans(call, o, o)
        plans = (gluon_attention.forward_plan(call, False), of_keys, of_queries)
    met = [None if plan is None else plan.constants[0].meets is not None for plan in plans]
    assert met == [forward, keys, queries]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sums_take_sixteen_bytes_at_a_time(head_dim: int) -> None:
    """64 * 64 / 128 numbers of dQ a thread, in two warpgroups: where a tile is added beside the next, and the last."""
    ptx = _backward(Variant(90, "hopper", "bf16", head_dim, "plain"))[OF_KEYS].asm["ptx"]
    added = re.findall(r"(?:atom|red)\.global\.[.\w]*add[.\w]*", ptx)
    wide = [name for name in added if ".v4.f32" in name]
    assert len(wide) == 2 * 2 * (64 * 64 // 128 // 4)
    assert [name for name in added if ".f32" in name] == wide


@pytest.mark.parametrize("variant", [v for v in BACKWARD if v.formula not in ("plain", "longer")], ids=str)
def test_each_item_of_a_program_has_bounds_of_its_own(variant: Variant) -> None:
    """Loops over tiles end where the item says: MLIR takes what only bounds loops for a thing that never changes."""
    call = variant.call()
    with compiling_for(90) as kernels:
        gluon_attention.forward(call)
    loops = {name: _bounds_of_inner_loops(kernel.asm["ttgir"]) for name, kernel in _backward(variant).items()}
    loops[FORWARD] = forward = _bounds_of_inner_loops(kernels[-1].asm["ttgir"])
    assert len(forward) == 2 + 2 or (len(forward) == 3 + 2 and variant.head_dim == 64), "who computes, who fetches"
    counts = OF_QUERIES not in loops  # the heads of a group, whose sums of dQ they are, and before them a run's tiles
    expected = {OF_KEYS: 2 * 2 + 2 + 2 * counts, OF_WIDE_KEYS: 2 + 1 + 2, OF_QUERIES: 2 * 2 + 1}
    for name in expected.keys() & loops.keys():
        assert len(loops[name]) == expected[name], "who computes, who fetches"
        heads = [bound for bound in loops[name] if bound[2] == f"arith.constant {call.group} : i32"]
        assert len(heads) == {OF_KEYS: counts, OF_WIDE_KEYS: 1, OF_QUERIES: 0}[name], "as long for every item"
        assert all(known > begun for begun, known, made in loops[name] if (begun, known, made) not in heads)
    assert all(known > begun for begun, known, _ in forward)


def _bounds_of_inner_loops(ir: str) -> list[tuple[int, int, str]]:
    """Of each `for` inside another loop: the line where the outer one begins, the one where the last value that bounds
    the inner one becomes known, and what makes the upper bound.
    """
    known: dict[str, int] = {}
    around: list[tuple[int, int]] = []  # indentation and line
    found = []
    lines = ir.splitlines()
    for number, line in enumerate(lines):
        text = line.lstrip()
        indent = len(line) - len(text)
        while around and indent <= around[-1][0] and not text.startswith(("} do {", "^")):
            around.pop()
        bounds = re.search(r"scf\.for %[\w.]+ = (%[\w.]+)(?:#\d+)? to (%[\w.]+)(?:#\d+)? ", line)
        if bounds and around:
            made = lines[known[bounds[2]]].partition(" = ")[2].partition(" loc(")[0]
            found.append((around[-1][1], max(known[name] for name in bounds.groups()), made))
        if bounds or "scf.while" in line:
            around.append((indent, number))
        if text.startswith(("^", "partition", "tt.func")):
            known.update(dict.fromkeys(re.findall(r"(%[\w.]+): ", line), number))
        known.update(dict.fromkeys(re.findall(r"(%[\w.]+)(?::\d+)? = ", line), number))
    return found
