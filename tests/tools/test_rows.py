"""The tools that look at rows while a kernel changes, on the CPU: what they print, and that they can fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tools import check_rows, compare_steps, compare_trees, time_rows

SOURCES = Path(__file__).resolve().parents[2] / "src"


def _run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[str]]:
    monkeypatch.setattr("sys.argv", ["check_rows", "--cpu", "--jobs", "1", *arguments])
    code = check_rows.main()
    return code, capfd.readouterr().out.splitlines()


def test_rows_that_agree_pass(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = _run(capfd, monkeypatch, "--only", "d64 causal packed 1", "d64 window deterministic")
    assert code == 0
    assert [line.split()[0] for line in lines] == ["PASS"] * 3 + ["total:"]
    assert "3 passed, 0 failed" in lines[-1]


def test_what_is_beyond_the_tolerance_fails(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = _run(capfd, monkeypatch, "--only", "d64 full 6", "--tol", "1e-12")
    assert code == 1
    assert lines[0].startswith("FAIL d64 full 62")
    with pytest.raises(SystemExit):
        _run(capfd, monkeypatch, "--only", "d64 empty")


def test_an_error_is_relative_and_sees_what_is_not_finite() -> None:
    x = torch.tensor([3.0, 4.0])
    assert check_rows.error(x, x) == 0.0
    assert check_rows.error(1.1 * x, x) == pytest.approx(0.1)
    assert check_rows.error(x * float("nan"), x) != check_rows.error(x * float("nan"), x)


def test_every_part_prints_a_rate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["time_rows", "f", "b", "g", "d", "m", "--tiny", "--seqlens", "64"])
    time_rows.main()
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("--")]) == 5
    timed = [line for line in lines if line.startswith(("forward", "backward"))]
    assert len(timed) >= 4 + 4 + 4 + 4 + 2
    assert all(float(line.partition(" ms")[0].split()[-1]) > 0.0 for line in timed)


def test_trees_stand_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose attention fails has gaps, and its peer's rate is not taken for its own."""
    broken = tmp_path / "broken"
    shutil.copytree(SOURCES / "tilewise", broken / "tilewise")
    module = broken / "tilewise" / "ops" / "attention" / "cpu.py"
    module.write_text(module.read_text() + "\nraise RuntimeError('broken')\n")
    options = ["--rounds", "1", "--tiny", "--seqlens", "64", "--masks", "full"]
    monkeypatch.setattr("sys.argv", ["compare_trees", "f", str(SOURCES), str(broken), *options])
    compare_trees.main()
    title, *cells = capsys.readouterr().out.splitlines()
    assert [str(SOURCES).endswith(title.split()[-2]), str(broken).endswith(title.split()[-1])] == [True, True]
    assert [cell.split()[:4] for cell in cells] == [["forward", "d8", "full", "64"], ["forward", "d16", "full", "64"]]
    assert all(cell.split()[-1] == "-" and float(cell.split()[-2]) > 0.0 for cell in cells)

    monkeypatch.setattr("sys.argv", ["compare_trees", "f", str(tmp_path), *options])
    with pytest.raises(SystemExit):
        compare_trees.main()
    assert "must hold a package tilewise" in capsys.readouterr().err


def test_steps_of_trees_take_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tree's own attention is timed, and its error seen; whose process ends is named."""
    wrong, broken = tmp_path / "wrong", tmp_path / "broken"
    adds_one = """
def tiled_forward(call, of_weights=None, forward=tiled_forward):
    o, lse = forward(call, of_weights)
    return o + 1.0, lse
"""
    for tree, last in ((wrong, adds_one), (broken, "raise RuntimeError('broken')")):
        shutil.copytree(SOURCES / "tilewise", tree / "tilewise")
        module = tree / "tilewise" / "ops" / "attention" / "cpu.py"
        module.write_text(f"{module.read_text()}\n{last}\n")
    options = ["--quick", "--rounds", "2", "--steps", "64x4k", "shared", "int8", "two-calls"]
    monkeypatch.setattr("sys.argv", ["compare_steps", str(SOURCES), str(wrong), *options])
    compare_steps.main()
    lines = capsys.readouterr().out.splitlines()
    errors = [float(line.split()[-1]) for line in lines[:8]]
    assert max(errors[:4]) < 1e-5 < 0.1 < min(errors[4:])
    title, *rows = lines[8:]
    assert title.split()[-2:] == [tree[1 - compare_steps.WIDTH :] for tree in (str(SOURCES), str(wrong))]
    assert [row.split()[0] for row in rows] == options[4:]
    assert all(float(row.split()[n].strip("(,)")) > 0.0 for row in rows for n in range(1, 7))

    monkeypatch.setattr("sys.argv", ["compare_steps", str(broken), *options])
    with pytest.raises(SystemExit, match="its process has ended"):
        compare_steps.main()
