"""Deliberately broken kernels: one classic mistake in a copy of the source, caught by a property."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tests.interpret.small_tiles import single, use_tiles
from tilewise.ops.attention import (
    triton_attention,
    triton_bwd,
    triton_decode,
    triton_fwd,
    triton_lists,
    triton_plans,
)
from tilewise.testing import cases as build
from tilewise.testing import properties
from tilewise.testing.case import Case, Spelled
from tilewise.testing.cases import CASES
from tilewise.testing.matrix import Check, name_of
from tilewise.testing.properties import Setting


def broken_copy(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """A copy of a kernel file with one change, imported under a name of its own."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert old in source, f"{module.__name__} has no `{old}` to break: choose another line for this twin"
    name = f"broken_{module.__name__.rpartition('.')[2]}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    spec.loader.exec_module(copy)
    return copy


_whole: set[tuple[object, ...]] = set()  # checks that have passed without a change


def fails_when_broken(
    check: Callable[[], None], module: ModuleType, kernels: tuple[str, ...], old: str, new: str, folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What passes with a kernel file as it is fails with one change in these kernels of it.

    The first is looked at once for all twins that differ in their change alone.
    """
    cells = (cell.cell_contents for cell in check.__closure__ or ())
    whole = (check.__code__, *(repr(value) for value in cells if not isinstance(value, pytest.MonkeyPatch)))
    if whole not in _whole:
        check()
        _whole.add(whole)
    copy = broken_copy(module, old, new, folder)
    for kernel in kernels:
        monkeypatch.setattr(module, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        check()


class Twin(NamedTuple):
    """`old` of a kernel file becomes `new`; then `check` must fail for the row on the case."""

    module: ModuleType
    kernels: tuple[str, ...]
    old: str
    new: str
    check: Check
    case: Case
    impl: str = "triton"

    def __repr__(self) -> str:
        return f"{self.module.__name__.rpartition('.')[2]}: {self.old} -> {self.new or 'nothing'} on {self.case}"


FORWARD, BACKWARD = properties.equals_reference, properties.gradients_equal_reference
FWD, KEYS, QUERIES = ("attention_fwd",), ("attention_bwd_keys",), ("attention_bwd_queries",)
SPLIT, MERGE = ("attention_split",), ("attention_merge",)
HOSTS = {triton_fwd: triton_plans, triton_bwd: triton_plans, triton_lists: triton_attention,
         triton_decode: triton_decode}  # who names a module's kernels  # fmt: skip
SHIFT = ("shift = seqlen_k - seqlen_q", "shift = 0")
ONE = {name: single(case) for name, case in CASES.items() if not case.gpu}
MANY_KEYS = Case("many_keys", 1, 2, 64 * 5 + 9, 4, 2, mask=build.window(250), score=build.softcap, sink=True)
GRID = Case("grid", 1, 63, 63, mask=build.neighborhood((7, 9), (5, 5)))
RISING = ONE["plain"].with_(scale=2.0)  # large scores, so that the running maximum moves


def _sink_scores(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s - 300.0


SUNK = ONE["plain"].with_(score=lambda case, make: Spelled(_sink_scores, _sink_scores))  # every exp(s) is 0 in float32

TWINS = [
    # forward
    Twin(triton_fwd, FWD, "acc = acc * alpha[:, None]", "acc = acc * 1.0", FORWARD, RISING),
    Twin(triton_fwd, FWD, "l_i = l_i * alpha + ", "l_i = l_i + ", FORWARD, RISING),
    Twin(triton_fwd, FWD, *SHIFT, FORWARD, ONE["causal_more_keys"]),
    Twin(triton_fwd, FWD, "m_i = tl.full([BLOCK_M], float(\"-inf\")", "m_i = tl.full([BLOCK_M], 0.0", FORWARD, SUNK),
    Twin(triton_fwd, FWD, "& in_k[None, :]", "", FORWARD, ONE["explicit"]),
    Twin(triton_fwd, FWD, "h // GROUP", "h % (HEADS // GROUP)", FORWARD, ONE["gqa_2"]),
    Twin(triton_fwd, FWD, "row0_k = tl.load(CU_K + b)", "row0_k = tl.load(CU_Q + b)", FORWARD, ONE["packed_cross"]),
    Twin(triton_fwd, FWD, "(m2 + tl.math.log2(l_safe)) * LN2", "m2 + tl.math.log2(l_safe)", FORWARD, ONE["plain"]),
    # backward
    Twin(triton_bwd, QUERIES, "1) - dlse", "1) + dlse", BACKWARD, ONE["lse_gradient"]),
    Twin(triton_bwd, KEYS, "row_values(b, h, row0_q", "row_values(b, h, 0 * row0_q", BACKWARD, ONE["packed_causal"]),
    Twin(triton_bwd, KEYS, "- delta[None, :]", "", BACKWARD, ONE["causal"]),
    Twin(triton_bwd, KEYS, *SHIFT, BACKWARD, ONE["causal_more_keys"]),
    Twin(triton_bwd, KEYS, "for g in range(GROUP)", "for g in range(1)", BACKWARD, ONE["gqa_2"]),
    Twin(triton_bwd, KEYS, "dk * scale", "dk", BACKWARD, ONE["plain"]),
    Twin(triton_bwd, QUERIES, "- delta[:, None]", "", BACKWARD, ONE["causal"]),
    Twin(triton_bwd, QUERIES, "ds = SLOPE(", "SLOPE(", BACKWARD, ONE["softcap_causal"]),
    Twin(triton_bwd, QUERIES, "ACCUMULATE(ds", "ACCUMULATE(p", BACKWARD, ONE["alibi_causal"]),
    Twin(triton_bwd, (*KEYS, *QUERIES), "seed = tl.load(SEED)", "seed = tl.load(SEED) + 1", BACKWARD, ONE["dropout"]),
    # decode
    Twin(triton_decode, SPLIT, "begin + share)", "begin + share - 1)", FORWARD, MANY_KEYS, "triton_decode"),
    Twin(triton_decode, SPLIT, "alpha[:, None]", "1.0", FORWARD,
         RISING.with_(heads_q=8, heads_kv=8, seqlen_q=2, seqlen_k=400), "triton_decode"),
    Twin(triton_decode, SPLIT, "offs_i = offs_m + shift", "offs_i = offs_m", FORWARD, MANY_KEYS, "triton_decode"),
    Twin(triton_decode, MERGE, "total = total * alpha", "total = total", FORWARD, MANY_KEYS.with_(sink=True, scale=3.0),
         "triton_decode"),
    # lists
    Twin(triton_lists, ("tile_lists",), *SHIFT, FORWARD, ONE["document_window"].with_(seqlen_q=20)),
    Twin(triton_lists, ("tile_lists",), "seen & sure & whole", "seen & whole", FORWARD, GRID),
    Twin(triton_lists, ("tile_lists",), "has_rows & maybe", "has_rows & maybe & (other > 0)[None, :]", FORWARD,
         ONE["dilated_window"]),
    Twin(triton_lists, ("block_extrema",), "tl.max(x, 0)", "tl.min(x, 0)", FORWARD, ONE["document_window"]),
]  # fmt: skip


@pytest.fixture
def _clean_modules() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.startswith("broken_")]:
        del sys.modules[name]


@pytest.mark.usefixtures("_clean_modules")
@pytest.mark.parametrize("twin", TWINS, ids=name_of)
def test_a_broken_twin_is_caught(twin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, "narrow")
    setting = Setting(twin.impl)
    twin.check(setting, twin.case)  # whole, it passes
    copy = broken_copy(twin.module, twin.old, twin.new, tmp_path)
    for kernel in twin.kernels:
        monkeypatch.setattr(HOSTS[twin.module], kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        twin.check(setting, twin.case)


def test_a_copy_with_no_mistake_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails the twins is their mistake and not the copying."""
    for module, kernels in (
        (triton_fwd, FWD),
        (triton_bwd, (*KEYS, *QUERIES)),
        (triton_lists, ("tile_lists",)),
    ):
        copy = broken_copy(module, "import triton\n", "import triton\n", tmp_path)
        for kernel in kernels:
            monkeypatch.setattr(HOSTS[module], kernel, getattr(copy, kernel))
    properties.gradients_equal_reference(Setting("triton"), ONE["document_window"])
