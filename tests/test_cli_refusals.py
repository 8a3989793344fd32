"""What commands refuse before they work: sizes that no call can have, targets that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.commands import data, refusal
from tilewise.cli import shapes
from tilewise.core.errors import InputError
from tilewise.schedule.sharing import Group
from tilewise.schedule.worklist import WorkList


@pytest.mark.parametrize(
    "lengths",
    ["4294967396", "3000000000", "9" * 20, "9" * 5000, "-2*3", "1000000000*1", "2*2000000000", "", "1,,2", "3*"],
)
def test_lengths_that_no_call_can_have_are_refused(lengths: str) -> None:
    assert refusal("why", f"--packed={lengths}").startswith("tilewise: --packed: got ")
    assert "LENGTHS" in refusal("explain", "plan", "--", lengths)


def test_lengths_are_counted() -> None:
    assert shapes.lengths("2*3, 4,0", "--packed") == [3, 3, 4, 0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("why", "--batch", "1" + "0" * 21), "shape: got "),
        (("why", "--seqlen-q", "99999999999", "--heads-q", "64"), "shape: got "),
        (("explain", "plan", "100", "--block-n", "9" * 23), "block_n: got "),
        (("explain", "plan", "100", "--rows", "9" * 23), "rows: got "),
        (("explain", "plan", "100", "--queries", "9" * 23), "seqlens: got "),
        (("explain", "plan", "100", "--heads-q", "9" * 23, "--heads-kv", "1"), "heads_q: got "),
        (("explain", "mask", "--mask", "causal", "--query", "3"), "--query: got 3 without --out"),
        (("tune-sparse", "--demo", "--block", "abc"), "--block: got 'abc'; expected one or two integers"),
        (("tune-sparse", "--demo", "--block", "1,2,3"), "--block: got "),
    ],
)
def test_sizes_out_of_range_are_refused(arguments: tuple[str, ...], says: str) -> None:
    assert f"tilewise: {says}" in refusal(*arguments)


def test_requests_without_queries_share_nothing() -> None:
    assert data("explain", "plan", "100,200", "--queries", "0", "--shared", "64", "--json")["tiles"] == 0
    with pytest.raises(InputError, match=r"^groups: got 0 tiles"):
        WorkList.build([0, 0], [9, 9], heads_q=1, heads_kv=1, programs=2, groups=[Group(0, 2, 1)], block_n=4)


@pytest.mark.parametrize("target", ["file", "file/below"])
def test_demo_looks_at_its_folder_before_it_trains(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tilewise.cli.demo.run", lambda *_: pytest.fail("trained"))
    assert refusal("demo", "--out", str(tmp_path / target)).startswith("tilewise: --out: got ")


@pytest.mark.parametrize("command", ["tune-sparse", "tune-windows"])
def test_tuning_looks_at_its_file_first(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewise.cli.dumps.layers", lambda *_, **__: pytest.fail("measured"))
    given = ("--demo",) if command == "tune-sparse" else ("x.pt", "--canvas=1,2,2", "--tile=1,2,2")
    for target in (tmp_path / "nodir" / "x.json", tmp_path):
        assert refusal(command, *given, "--out", str(target)).startswith("tilewise: --out: got ")


def test_a_dump_without_tokens_is_refused(tmp_path: Path) -> None:
    torch.save(dict.fromkeys("qkv", torch.zeros(1, 0, 2, 16)), tmp_path / "x.pt")
    given = (str(tmp_path / "x.pt"), "--out", str(tmp_path / "found.json"))
    assert "q of shape (1, 0, 2, 16)" in refusal("tune-sparse", *given)
