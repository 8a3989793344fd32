"""The tools that look at rows while a kernel changes, on the CPU: what they print, and that they can fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tools import check_rows, compare_trees, time_rows, tree_calls

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


def test_trees_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
    calls = ["64x4k", "shared", "int8", "two-calls", "f:window:4096:64", "b:softcap:4096:128:4/2"]
    options = ["--quick", "--rounds", "2", "--calls", *calls]
    monkeypatch.setattr("sys.argv", ["compare_trees", str(SOURCES), str(wrong), *options])
    compare_trees.main()
    lines = capsys.readouterr().out.splitlines()
    errors = [float(line.split()[-1]) for line in lines[: 2 * len(calls)]]
    assert max(errors[: len(calls)]) < 1e-5
    assert min(errors[len(calls) :]) > 0.1
    title, *rows = lines[2 * len(calls) :]
    assert title.split()[-2:] == [tree[1 - compare_trees.WIDTH :] for tree in (str(SOURCES), str(wrong))]
    assert [row.split()[0] for row in rows] == calls
    numbers = [[float(word.strip("(,)x")) for word in row.split()[1:]] for row in rows]
    assert all(min(row) > 0.0 and row[3] == 1.0 for row in numbers)
    assert all(row[7] == pytest.approx(row[4] / row[0], abs=2e-3) for row in numbers if row[0] > 100.0)

    monkeypatch.setattr("sys.argv", ["compare_trees", str(broken), *options])
    with pytest.raises(SystemExit, match="its process has ended"):
        compare_trees.main()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", "--calls", "64x4k"], "TREE must hold a package tilewise, got nowhere"),
        ([str(SOURCES), "--calls", "f:causal:4k:128"], "f:causal:4k:128"),
        ([str(SOURCES), "--calls", "f:spiral:4096:128"], "FORMULA of full, causal, window"),
        ([str(SOURCES), "--calls", "f:full:4096:128:sage9"], "a scheme (sage2, "),
    ],
)
def test_what_trees_cannot_be_asked(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["compare_trees", *arguments])
    with pytest.raises(SystemExit):
        compare_trees.main()
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_name_says_all_of_a_problem() -> None:
    plain = tree_calls.problem_of("b:causal:4096:128")
    assert plain == tree_calls.Problem("b", "causal", 4096, 128)
    given = tree_calls.problem_of("f:prefix:512:64:32/8:deterministic:fp8")
    assert given == tree_calls.Problem("f", "prefix", 512, 64, (32, 8), deterministic=True, scheme="fp8")


def test_codes_and_repeated_gradients_are_timed() -> None:
    for name, most in (("f:causal:2048:128:blocks", 0.2), ("b:full:2048:128:deterministic", 1e-5)):
        made = tree_calls.make(name, "cpu", quick=True)
        assert 0.0 < made.error(made.call()) < most
        assert made.turn_ms > 0.0
