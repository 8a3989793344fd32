"""Samples of a kernel by segment and instruction, from a file as Nsight Compute writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import hot_spots

NAMES = "Address,Source,# Samples,Instructions Executed,stall_wait,stall_long_sb,stall_wait (Not Issued)"
ROWS = [
    "0,MOV R1   R2 ,1,8,1,,",
    "10,FADD R1 R1 R2,9,100,3,6,5",
    "20,@P0 BRA 0x40,30,101,,30,",
    "30,EXIT,,8,,,",
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "source.csv"
    path.write_text("\n".join(['"Kernel Name","attention"', NAMES, *ROWS]) + "\n")
    return path


def test_segments_are_what_was_executed_as_often(file: Path) -> None:
    code = hot_spots.read(file)
    assert [[x.number for x in segment] for segment in hot_spots.segments(code)] == [[0], [1, 2], [3]]
    samples, waits = hot_spots.summed(code[1:3])
    assert samples == 39
    assert dict(waits) == {"wait": 3, "long_sb": 36}, "samples of warps that could not issue are counted in these"


def test_the_hottest_are_printed_with_their_reasons(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["hot_spots", str(file), "--least", "5", "--top", "1"])
    hot_spots.main()
    segment, instruction = capsys.readouterr().out.splitlines()
    assert segment.split()[:2] == ["1-2", "2"]
    assert all(text in segment for text in ("97.5 %", "long_sb 92 %"))
    assert all(text in instruction for text in ("75.00 %", "@P0 BRA 0x40", "long_sb 100 %"))
