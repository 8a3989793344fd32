"""What a kernel is looked at for before its first launch: memory that it does not get, and code that is known to be
wrong, whatever formula led to it.
"""

from __future__ import annotations

import pathlib
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from tilewise.core.errors import UnsupportedError
from tilewise.ops import assembled, triton_compile
from tilewise.ops.triton_compile import compiled_for, look_at

WIDE = "tensor<16x16xf16, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 8}>>"
UNSET = " /*0000*/ HGMMA.64x32x16.F32 R24, R44, gdesc[UR20].tnspB, R24 ;"
SET = " /*0000*/ UMOV UR22, 0x1 ;\n /*0010*/ UMOV UR23, 0x1 ;\n" + UNSET.replace("0000", "0020")
LIMIT = 1000


def compiled(name: str, text: str = "", ptx: str = "", shared: int = LIMIT) -> Any:
    metadata = SimpleNamespace(name="attention_fwd", shared=shared, enable_fp_fusion=True)
    asm = {"ttgir": text, "ptx": ptx, "cubin": b"old " + name.encode()}
    return SimpleNamespace(
        hash=name, asm=asm, kernel=asm["cubin"], metadata=metadata, module=1, function=2, _run=lambda: None
    )


class Tools:
    """Assembler and disassembler: what each binary says, and which calls there were."""

    def __init__(self, old: str, new: str) -> None:
        self.says, self.calls = {b"old": old, b"new": new}, list[str]()

    def run(self, tool: str, arguments: list[str]) -> str:
        self.calls.append(tool)
        if tool == "ptxas-blackwell":
            pathlib.Path(arguments[-1]).write_bytes(b"new binary")
            return ""
        return self.says[pathlib.Path(arguments[-1]).read_bytes()[:3]]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(triton_compile, "_sound", {})
    assembled.inspected.cache_clear()
    assembled._warn.cache_clear()


def test_wide_operands_are_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"attention_fwd: got code of Triton .* whose lanes hold more"):
            look_at(compiled("wide", WIDE))


def test_others_pass() -> None:
    look_at(compiled("other", WIDE.replace("kWidth = 8", "kWidth = 4")))


def test_a_kernel_that_loses_addresses_is_assembled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(old=UNSET, new=SET)
    monkeypatch.setattr(assembled, "_run", tools.run)
    one = compiled("lost", ptx="wgmma.mma_async")
    look_at(one)
    assert one.kernel == one.asm["cubin"] == b"new binary"
    assert one.module is one.function is one._run is None, "what was loaded is loaded anew"
    look_at(one)
    assert tools.calls == ["nvdisasm", "ptxas-blackwell", "nvdisasm"], "looked at once"
    of_another_device = compiled("lost", ptx="wgmma.mma_async")
    look_at(of_another_device)
    assert of_another_device.kernel == b"new binary"


def test_a_kernel_that_no_assembler_makes_right_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembled, "_run", Tools(old=UNSET, new=UNSET).run)
    one = compiled("lost", ptx="wgmma.mma_async")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="products at addresses that are not set: 0000: HGMMA"):
            look_at(one)
    assert one.kernel == b"old lost"


def test_without_the_newer_assembler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(tool: str, arguments: list[str]) -> str:
        if tool == "ptxas-blackwell":
            raise FileNotFoundError(tool)
        return UNSET

    monkeypatch.setattr(assembled, "_run", run)
    with pytest.raises(UnsupportedError, match="addresses that are not set"):
        look_at(compiled("lost", ptx="wgmma.mma_async"))


def test_a_sound_binary_is_disassembled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its bytes, also in the next process; another binary is looked at, and so is this one by another check."""
    tools = Tools(old=SET, new=SET)
    monkeypatch.setattr(assembled, "_run", tools.run)
    for _ in range(2):
        look_at(compiled("sound", ptx="wgmma.mma_async"))
        triton_compile._sound.clear()
        assembled.inspected.cache_clear()
    assert tools.calls == ["nvdisasm"]
    look_at(compiled("another", ptx="wgmma.mma_async"))
    monkeypatch.setattr(assembled, "_check", lambda: b"another check")
    triton_compile._sound.clear()
    look_at(compiled("sound", ptx="wgmma.mma_async"))
    assert tools.calls == ["nvdisasm"] * 3


def test_kernels_without_such_products_are_not_disassembled(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(old=UNSET, new=UNSET)
    monkeypatch.setattr(assembled, "_run", tools.run)
    look_at(compiled("of another GPU", ptx="mma.sync"))
    assert not tools.calls


@pytest.mark.parametrize("problem", [FileNotFoundError("nvdisasm"), subprocess.CalledProcessError(1, "nvdisasm")])
def test_without_a_disassembler_there_is_a_warning(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(tool: str, arguments: list[str]) -> str:
        raise problem

    monkeypatch.setattr(assembled, "_run", run)
    with pytest.warns(RuntimeWarning, match=r"cannot look for the assembler's known fault .*nvdisasm"):
        look_at(compiled("unseen", ptx="wgmma.mma_async"))


class Kernel:
    """A `triton.jit` function whose shared memory is so much for each stage."""

    def __init__(self, each: int) -> None:
        self.each, self.stages = each, list[int]()

    def run(self, *arguments: Any, grid: tuple[int, ...], warmup: bool, num_stages: int, num_warps: int) -> Any:
        assert warmup
        assert grid == (3,)
        self.stages.append(num_stages)
        return compiled(f"{self.each} {num_stages}", shared=self.each * num_stages)


@pytest.mark.parametrize(("each", "tried"), [(300, [3]), (500, [3, 2]), (501, [3, 2, 1]), (1000, [3, 2, 1])])
def test_stages_that_do_not_fit_are_left_out(each: int, tried: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_compile, "shared_limit", lambda: LIMIT)
    kernel = Kernel(each)
    found, options = compiled_for(kernel, 3, (), {"num_stages": 3, "num_warps": 4})
    assert kernel.stages == tried
    assert options == {"num_stages": tried[-1], "num_warps": 4}
    assert found.metadata.shared == each * tried[-1]


def test_a_kernel_that_never_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_compile, "shared_limit", lambda: LIMIT)
    with pytest.raises(UnsupportedError, match="attention_fwd: got 1001 bytes of shared memory; expected at most 1000"):
        compiled_for(Kernel(1001), 3, (), {"num_stages": 2, "num_warps": 4})
