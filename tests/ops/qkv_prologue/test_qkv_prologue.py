"""`qkv_prologue` on a CPU, by every implementation: numbers within bounds of float64, shared objects."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.core.errors import InputError
from tilewise.ops import qkv_prologue as module
from tilewise.ops.qkv_prologue import QKVPrologue, cpu, qkv_prologue
from tilewise.ops.qkv_prologue.problem import Call
from tilewise.quant import KINDS
from tilewise.testing import qkv_prologue as cases
from tilewise.testing.properties import Setting
from tilewise.testing.qkv_prologue import BY_NAME, CASES, EPS, PrologueCase, named
from tilewise.testing.writing import Memory

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SETTINGS = [Setting(impl, dtype) for impl in ("cpu", "apart", "reference") for dtype in DTYPES]
SOME = ("norms", "plain_part", "int8", "fp8_neighbours", "int4", "channels4", "channels2")


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_equals_float64(setting: Setting, case: PrologueCase) -> None:
    cases.check(case, setting)


@settings(max_examples=40, deadline=None)
@given(
    setting=st.sampled_from(SETTINGS),
    sizes=st.tuples(st.integers(0, 12), st.integers(1, 3), st.sampled_from([1, 3, 4])),
    pairs=st.tuples(st.integers(1, 12), st.integers(0, 6)),
    pages=st.sampled_from(["plain", *KINDS]),
    page_size=st.integers(1, 9),
    memory=st.sampled_from(["NHD", "HND", "joint"]),
    norms=st.sampled_from(["", "own", "float32"]),
    flags=st.tuples(*[st.booleans()] * 2),
    gap=st.integers(0, 9),
)
def test_any_shape(
    setting: Setting, sizes: tuple[int, int, int], pairs: tuple[int, int], pages: str, page_size: int, memory: str,
    norms: str, flags: tuple[bool, bool], gap: int,
) -> None:  # fmt: skip
    interleaved, skip = flags
    case = PrologueCase(
        "any", *sizes, 2 * sum(pairs), 2 * pairs[0], interleaved, norms, pages, memory, page_size, 12, gap, skip
    )
    cases.check(case, setting)


def test_norms_of_any_dtype_and_eps() -> None:
    """A head that is small beside eps stays small; without eps its size makes no difference."""
    case, setting = BY_NAME["norms"], Setting("cpu")
    held = cases.make_memory(case, setting)
    given = cases.make_inputs(case, setting, held)
    ones, pages = torch.ones(2, case.head_dim), (held.k_pages, held.v_pages)
    found = [
        qkv_prologue(given.qkv * size, *pages, given.slots, rope=given.rope, eps=eps, **named(tuple(ones)))
        for size, eps in ((1e-4, 0.0), (1.0, 0.0), (1e-4, 1.0))
    ]
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0].square().mean(-1), torch.ones(found[0].shape[:2]))
    torch.testing.assert_close(found[2].square().mean(-1).max(), torch.tensor(0.0), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("impl", ["cpu", "apart", "reference"])
@pytest.mark.parametrize("pages", ["plain", *KINDS, "channels4"])
def test_tokens_without_slots_write_nothing(pages: str, impl: str) -> None:
    setting, case = Setting(impl, torch.float16), replace(BY_NAME["norms"], pages=pages)
    held, wanted = (cases.make_memory(case, setting) for _ in range(2))
    found = cases.make_inputs(case, setting, held)
    found.slots.fill_(-3)
    cases.check_results(case, setting, found, held, wanted, cases.ours(found, held, impl))


@pytest.mark.parametrize("impl", ["cpu", "apart", "reference"])
def test_a_pool_without_pages(impl: str) -> None:
    setting, case = Setting(impl), replace(BY_NAME["plain"], num_pages=5)
    held = cases.make_memory(case, setting)
    found = cases.make_inputs(case, setting, held)
    found.slots.fill_(-1)
    q = cases.ours(found, held, impl)
    none = Memory((), held.k_pages[:0], held.v_pages[:0])
    assert torch.equal(cases.ours(found, none, impl), q)


def test_no_token() -> None:
    pages = torch.zeros(2, 3, 4, 2, 16)
    rope = tw.Rope(*tw.rope_tables(16, 8), torch.zeros(0, dtype=torch.int32))
    q = qkv_prologue(torch.zeros(0, 10, 16), *pages, torch.zeros(0, dtype=torch.int32), rope=rope)
    assert (q.shape, q.dtype) == ((0, 6, 16), torch.float32)


@pytest.mark.parametrize("impl", ["cpu", "apart", "reference"])
def test_qkv_stays_and_autograd_knows_of_new_pages(impl: str) -> None:
    for name in ("plain", "norms", "int8", "channels4"):
        case, setting = BY_NAME[name], Setting(impl)
        held = cases.make_memory(case, setting)
        found = cases.make_inputs(case, setting, held)
        before = found.qkv.clone()
        raw = [x if isinstance(x, torch.Tensor) else x.data for x in (held.k_pages, held.v_pages)]
        versions = [x._version for x in raw]
        cases.ours(found, held, impl)
        assert torch.equal(found.qkv, before)
        assert all(x._version > version for x, version in zip(raw, versions, strict=True))


# twins ---------------------------------------------------------------------------------------------------------------


def _twice_rounded(call: Call) -> torch.Tensor:
    """Keys and queries rounded after the norm, as `apart` has them."""
    assert call.norms is not None
    q, k = (tw.rms_norm(x, w, eps=call.eps) for x, w in zip((call.q, call.write.k), call.norms, strict=True))
    without = replace(call, q=q, qk=torch.cat((q, k), 1), write=replace(call.write, k=k), norms=None)
    return cpu.forward(without)


def _changed(**changes: Callable[[Any], Any]) -> Callable[[Call], torch.Tensor]:
    """The CPU's row with parts of the call changed."""

    def forward(call: Call) -> torch.Tensor:
        changed = {name: change(getattr(call, name)) for name, change in changes.items()}
        return cpu.forward(replace(call, **changed))

    return forward


def _turned_back(write: Any) -> Any:
    return replace(write, rope=replace(write.rope, sin=-write.rope.sin))


TWINS: dict[str, tuple[Callable[[Call], torch.Tensor], str]] = {
    "rounded twice": (_twice_rounded, "norms"),
    "rounded twice, then encoded": (_twice_rounded, "int8"),
    "other eps": (_changed(eps=lambda eps: 2.0 * eps + 1e-3), "norms"),
    "weights exchanged": (_changed(norms=lambda norms: norms[::-1]), "norms"),
    "weights exchanged, channels": (_changed(norms=lambda norms: norms[::-1]), "channels4"),
    "turned back": (_changed(write=_turned_back), "plain"),
    "turned back, int4": (_changed(write=_turned_back), "int4"),
    "turned back, channels": (_changed(write=_turned_back), "channels2"),
    "a slot written that is another's": (
        _changed(write=lambda write: replace(write, slots=write.slots.abs() - (write.slots < 0).int())), "plain",
    ),
    "values are others": (_changed(write=lambda write: replace(write, v=write.v + 1.0)), "float32_norms"),
    "values are others, fp8": (_changed(write=lambda write: replace(write, v=write.v + 1.0)), "fp8"),
}  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_a_broken_twin_is_caught(name: str) -> None:
    forward, of_case = TWINS[name]
    case, setting = BY_NAME[of_case], Setting("cpu", torch.bfloat16)
    for run in (cpu.forward, forward):
        held, wanted = (cases.make_memory(case, setting) for _ in range(2))
        found = cases.make_inputs(case, setting, held)
        call = module.make_call(
            (found.qkv, held.k_pages, held.v_pages, *(found.norms or (None, None))), found.slots, found.rope, EPS
        )
        q = run(call)
        if run is cpu.forward:
            cases.check_results(case, setting, found, held, wanted, q)
        else:
            with pytest.raises(AssertionError):
                cases.check_results(case, setting, found, held, wanted, q)


# layers that share an object -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("impl", [None, "apart", "reference"])
def test_layers_share_an_object(impl: str | None, name: str) -> None:
    """Bits are those of one call a layer, whatever a layer's tensors are like."""
    case, setting = BY_NAME[name], Setting("cpu", torch.bfloat16)
    first = cases.make_inputs(case, setting, cases.make_memory(case, setting))
    shared = QKVPrologue(first.slots, rope=first.rope, eps=EPS, impl=impl)
    layers = [
        replace(case, seed=1),
        replace(case, seed=2),
        replace(case, seed=3, norms="" if case.norms else "own"),
        replace(case, seed=4, gap=case.gap + 8),
        replace(case, seed=5),
    ]
    for layer in layers:
        held, other = (cases.make_memory(replace(layer, seed=case.seed), setting) for _ in range(2))
        make = replace(layer, seed=case.seed if case.pages in cases.CHANNELS else layer.seed)
        given = cases.make_inputs(make, setting, held)._replace(slots=first.slots, rope=first.rope)
        q = shared.run(given.qkv, held.k_pages, held.v_pages, **named(given.norms))
        assert torch.equal(q, cases.ours(given, other, impl))
        assert all(torch.equal(a, b) for a, b in zip(held.bits, other.bits, strict=True))


@pytest.mark.parametrize("pages", ["plain", "int8", "channels4"])
def test_what_changed_in_place_is_checked_again(pages: str) -> None:
    case, setting = replace(BY_NAME["plain"], pages=pages), Setting("cpu")
    held, other = (cases.make_memory(case, setting) for _ in range(2))
    given = cases.make_inputs(case, setting, held)
    shared = QKVPrologue(given.slots, rope=given.rope, eps=EPS)
    slots, positions = given.slots.clone(), given.rope.positions.clone()
    arguments = (given.qkv, held.k_pages, held.v_pages)
    shared.run(*arguments)
    before = held.bits

    for index, kept, bad, message in (
        (given.slots, slots, case.num_pages * case.page_size, "slot_mapping: got slot 28; expected below 28"),
        (given.slots, slots, int(slots.max()), r"slot_mapping: got slot \d+ twice"),
        (given.rope.positions, positions, cases.POSITIONS, "rope: got position 200; expected 0 to 199"),
        (given.rope.positions, positions, -1, "rope: got position -1; expected 0 to 199"),
    ):
        index[int(slots.argmin())] = bad
        for _ in range(2):
            with pytest.raises(InputError, match=message):
                shared.run(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(held.bits, before, strict=True))
        index.copy_(kept)

    cases.ours(given, other, "cpu")
    given.rope.positions.add_(1).remainder_(cases.POSITIONS)
    if pages != "channels4":  # whose slots are those that its pages need
        given.slots.copy_(torch.where(slots < 0, slots, (slots + 5) % (case.num_pages * case.page_size)))
    q = shared.run(*arguments)
    assert torch.equal(q, cases.ours(given, other, "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(held.bits, other.bits, strict=True))


def test_what_was_checked_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case, setting = BY_NAME["norms"], Setting("cpu")
    held = cases.make_memory(case, setting)
    given = cases.make_inputs(case, setting, held)
    shared = QKVPrologue(given.slots, rope=given.rope)
    made: list[int] = []
    monkeypatch.setattr(module, "make_call", lambda *parts, make=module.make_call: made.append(1) or make(*parts))
    for qkv in (given.qkv, given.qkv.clone(), given.qkv + 1.0, given.qkv[..., :16]):
        shared.run(qkv, held.k_pages, held.v_pages, **named(given.norms))
    assert len(made) == 1
    shared.run(given.qkv, held.k_pages, held.v_pages)
    with torch.no_grad():
        shared.run(given.qkv, held.k_pages, held.v_pages)
    assert len(made) == 3


def test_values_that_cannot_be_read_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: with TILEWISE_DEBUG=1 given or taken away between two runs, or inside a CUDA graph."""
    case, setting = BY_NAME["norms"], Setting("cpu")
    held = cases.make_memory(case, setting)
    given = cases.make_inputs(case, setting, held)
    arguments = (given.qkv, held.k_pages, held.v_pages)
    for hidden in ((True, False, True), (False, True, False)):
        shared = QKVPrologue(given.slots, rope=given.rope)
        for now in hidden:
            monkeypatch.setattr(module, "unreadable", lambda x, now=now: now)
            shared.run(*arguments)


def test_the_example_runs() -> None:
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(QKVPrologue, "QKVPrologue", globs={"torch": torch, "tw": tw}):
        runner.run(test)
    assert (runner.tries, runner.failures) == (5, 0)
