"""The scripts of examples/ run as a reader would run them; each checks its own claims."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import fresh

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_example_runs(script: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    temporary = {"TMPDIR": str(tmp_path_factory.mktemp("temporary"))}
    done = fresh.run(program, folder=tmp_path, first=str(EXAMPLES), environment=os.environ | temporary)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.strip()
    assert not list(tmp_path.iterdir()), "no example leaves files in the current folder"


def test_there_are_examples() -> None:
    assert len(SCRIPTS) >= 4
