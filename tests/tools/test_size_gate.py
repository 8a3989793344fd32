from __future__ import annotations

from pathlib import Path

import pytest

from tools import size_gate


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "limit"), [("plain.py", 400), ("triton_fwd.py", 600), ("gluon_sm90.py", 600), ("tiles/softmax.py", 600)]
)
def test_line_limit_is_the_last_allowed_line(tmp_path: Path, name: str, limit: int) -> None:
    path = _write(tmp_path, name, "x = 1\n" * limit)
    assert list(size_gate.violations(path)) == []
    path.write_text("x = 1\n" * (limit + 1))
    assert len(list(size_gate.violations(path))) == 1


def test_a_public_signature_is_limited_a_private_or_device_one_is_not(tmp_path: Path) -> None:
    fifteen = ", ".join(f"a{i}" for i in range(15))
    source = "\n".join(
        [
            f"def fits({fifteen}): ...",
            f"def catches({fifteen}, **unknown: NoReturn): ...",
            f"def too_many({fifteen}, *, more): ...",
            f"def _private({fifteen}, more): ...",
            f"@triton.jit\ndef kernel({fifteen}, more): ...",
            "class Public:",
            f"    def fits(self, {fifteen}): ...",
            f"    def __init__(self, {fifteen}, **more): ...",
            "class _Private:",
            f"    def run(self, {fifteen}, more): ...",
        ]
    )
    found = list(size_gate.violations(_write(tmp_path, "signatures.py", source)))
    assert [line.split()[1] for line in found] == ["too_many", "Public.__init__"]


def test_exit_status_and_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, "long.py", "x = 1\n" * 401)
    assert size_gate.main([str(tmp_path)]) == 1
    assert "401 lines, at most 400" in capsys.readouterr().out


def test_the_repository_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert size_gate.main([]) == 0, capsys.readouterr().out
