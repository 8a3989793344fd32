"""`tilewise demo` on the command line."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

import pytest

from tests.commands import call, data, refusal
from tilewise.cli.demo import NEXT
from tilewise.demo import TOLERANCE


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for name in ("ast", "bisect", "heapq"):
        (folder / f"{name}.py").write_text(Path(ast.__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
    return folder


def test_demo_prints_json_alone_on_stdout(text: Path) -> None:
    tiny = ("--size=tiny", "--steps=4", "--device=cpu", "--new-tokens=4", "--prompt=import ")
    found = data("demo", *tiny, "--text", str(text))
    assert found["passed"] is True
    assert found["prompt"] == "import"
    assert len(found["losses"]["tilewise"]) == len(found["losses"]["torch"]) == 4


def test_demo_in_plain_text_shows_progress_and_code(text: Path) -> None:
    out = call("demo", "--size=tiny", "--steps=3", "--device=cpu", "--new-tokens=4", "--text", str(text))
    assert "step     1/3" in out
    assert "the curves agree" in out
    assert "class Reader:" in out
    assert out.index("class Reader:") < out.index("Training: same weights") < out.index("memory kept")
    assert "written: nothing" in out


def test_demo_writes_where_it_is_told_and_nowhere_else(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    tiny = ("--size=tiny", "--steps=25", "--device=cpu", "--new-tokens=4", "--text", str(text))
    out = call("demo", *tiny, "--out", str(folder))
    assert f"written: {folder}/: result.json, losses.csv, generated.py" in out
    header, *lines = (folder / "losses.csv").read_text().splitlines()
    assert header == "step,tilewise,torch,tilewise cpu_tiled"
    assert (len(lines), lines[0].split(",")[0], lines[-1].split(",")[-1]) == (25, "1", "")
    found = json.loads((folder / "result.json").read_text())
    assert float(lines[0].split(",")[1]) == found["losses"]["tilewise"][0]
    assert (folder / "generated.py").read_text().startswith("class Reader:")
    assert len(list(tmp_path.iterdir())) == 1


def test_demo_s_next_commands_run() -> None:
    for command, _ in NEXT:
        program, *arguments = shlex.split(command)
        assert program == "tilewise"
        quick = ("--seconds=0.01", "--seqlen=64") if arguments[0] == "bench" else ()
        assert call(*arguments, *quick)


def test_demo_ends_with_1_where_the_curves_leave_the_tolerance(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOLERANCE, "fp32", 0.0)
    options = ("--size=tiny", "--steps=20", "--device=cpu", "--new-tokens=0", "--impl=cpu_tiled")
    found = data("demo", *options, "--text", str(text), code=1)
    assert found["passed"] is False
    assert 0 < found["max_difference"] < 1e-3


def test_demo_s_help_states_the_tolerances() -> None:
    text = " ".join(call("demo", "--help").split())
    assert f"{TOLERANCE['fp32']:g} nats in fp32, {TOLERANCE['bf16']:g} in bf16" in text


def test_demo_refuses_what_is_not_there(tmp_path: Path) -> None:
    assert "nowhere" in refusal("demo", "--size=tiny", "--json", "--text", str(tmp_path / "nowhere"))
