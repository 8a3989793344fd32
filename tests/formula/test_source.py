"""Emitted source: what runs is its text, whole or not at all, whoever else reads, writes or owns the cache folder."""

from __future__ import annotations

import errno
import inspect
import itertools
import linecache
import os
import pathlib
import py_compile
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tilewise.core import cache_folder as folders
from tilewise.core.cache_folder import cache_folder
from tilewise.core.errors import InputError
from tilewise.formula import source as cache
from tilewise.formula.source import FOLDER, import_source

_numbers = itertools.count()


def text(body: str = "") -> str:
    """A source that no other test has."""
    return f"NUMBER = {os.getpid()}, {next(_numbers)}\n{body}\ndef value():\n    return 'emitted'\n"


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache folder that is not there yet."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A home, where no folder is named."""
    monkeypatch.delenv("TILEWISE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folders._temporary.cache_clear()
    return tmp_path


def test_a_module_is_its_text_and_can_be_read_back(folder: pathlib.Path) -> None:
    source = text()
    module = import_source(source)
    assert module.value() == "emitted"
    assert import_source(source) is module
    assert sys.modules[module.__name__] is module
    assert module.__file__ is not None
    assert pathlib.Path(module.__file__).read_text() == source
    assert pathlib.Path(module.__file__).is_relative_to(folder)
    assert inspect.getsource(module.value) == "def value():\n    return 'emitted'\n"
    assert [path.suffix for path in cache_folder(FOLDER).iterdir()] == [".py"]


def planted(source: str, instead: str) -> pathlib.Path:
    """Somebody else's file of the name that a source will have."""
    module = import_source(source)
    del sys.modules[module.__name__]
    assert module.__file__ is not None
    path = pathlib.Path(module.__file__)
    path.write_text(instead)
    return path


def test_a_planted_compiled_file_does_not_run(folder: pathlib.Path) -> None:
    source = text()
    path = planted(source, "def value():\n    return 'planted'\n")
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    path.write_text(source)
    assert import_source(source).value() == "emitted"


@pytest.mark.parametrize("instead", ["def value():\n    return 'planted'\n", "def value(", ""])
def test_a_file_that_says_something_else_is_written_anew(folder: pathlib.Path, instead: str) -> None:
    source = text()
    path = planted(source, instead)
    assert import_source(source).value() == "emitted"
    assert path.read_text() == source


def test_a_file_that_is_no_text_is_written_anew(folder: pathlib.Path) -> None:
    source = text()
    path = planted(source, "")
    path.write_bytes(b"\xff\xfe\x00")
    assert import_source(source).value() == "emitted"
    assert path.read_text() == source


def test_threads_never_see_half_a_module(folder: pathlib.Path) -> None:
    source = text("import time\ntime.sleep(0.05)")
    start, found = threading.Barrier(8), []

    def work() -> None:
        start.wait()
        found.append(import_source(source))
        found[-1].value()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(module) for module in found}) == 1
    assert all(hasattr(module, "value") for module in found)


def test_processes_that_begin_together_have_the_same(folder: pathlib.Path) -> None:
    program = (
        "from tilewise.formula.source import import_source\n"
        "print([import_source(f'NUMBER = {n}\\ndef value():\\n    return NUMBER\\n').value() for n in range(50)])"
    )
    started = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert said == [f"{[*range(50)]}\n"] * 3
    assert {path.suffix for path in cache_folder(FOLDER).iterdir()} == {".py"}


def test_a_source_that_fails_leaves_nothing_behind(folder: pathlib.Path) -> None:
    source = text("import sys\nif not hasattr(sys, 'tilewise_test'):\n    raise ValueError('not now')")
    before = set(sys.modules), set(linecache.cache)
    for _ in range(2):
        with pytest.raises(ValueError, match="not now"):
            import_source(source)
        assert (set(sys.modules), set(linecache.cache)) == before
    sys.tilewise_test = True  # type: ignore[attr-defined]
    try:
        assert import_source(source).value() == "emitted"
    finally:
        del sys.tilewise_test  # type: ignore[attr-defined]


def test_a_child_of_a_process_that_imports_can_import(folder: pathlib.Path) -> None:
    cache._lock.acquire()
    try:
        before = cache._lock
        cache._after_fork()
        assert cache._lock is not before
        assert cache._lock.acquire(blocking=False)
        cache._lock.release()
        cache._lock = before
    finally:
        cache._lock.release()


def test_the_folder_is_for_its_owner_alone(folder: pathlib.Path) -> None:
    made = cache_folder(FOLDER)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    made.chmod(0o777)
    assert stat.S_IMODE(cache_folder(FOLDER).stat().st_mode) == 0o700


def of_another(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / FOLDER).mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(root).st_uid + 1)


def a_file(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    root.write_text("in the way")


def a_file_inside(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(parents=True)
    (root / FOLDER).write_text("in the way")


def a_link(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(parents=True)
    (root / "elsewhere").mkdir()
    (root / FOLDER).symlink_to(root / "elsewhere")


def read_only(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))


def full(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "mkdir", mkdir)


BROKEN: dict[str, Callable[[pathlib.Path, pytest.MonkeyPatch], None]] = {
    function.__name__: function for function in (of_another, a_file, a_file_inside, a_link, read_only, full)
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_named_folder_that_cannot_be_used_is_an_error(
    name: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BROKEN[name](folder, monkeypatch)
    with pytest.raises(InputError, match="TILEWISE_CACHE: got") as caught:
        import_source(text())
    assert str(folder) in str(caught.value)
    assert "a folder that is yours" in str(caught.value)


@pytest.mark.parametrize("name", BROKEN)
def test_without_a_usable_home_there_is_a_temporary_folder(
    name: str, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = home / ".cache" / "tilewise"
    BROKEN[name](root, monkeypatch)
    module = import_source(text())
    assert module.value() == "emitted"
    assert inspect.getsource(module.value).startswith("def value")
    assert module.__file__ is not None
    assert not pathlib.Path(module.__file__).is_relative_to(home)
    assert pathlib.Path(module.__file__).exists()
    assert stat.S_IMODE(pathlib.Path(module.__file__).parent.stat().st_mode) == 0o700


def test_without_a_home_there_is_a_temporary_folder(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", nowhere)
    assert import_source(text()).value() == "emitted"


FAILING: dict[str, tuple[Any, str]] = {
    "write": (folders.tempfile, "mkstemp"),
    "replace": (os, "replace"),
    "read": (pathlib.Path, "read_text"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_file_that_cannot_be_had_is_not_needed(
    name: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, or the folder has become another's: the text runs, and can be read back."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*FAILING[name], refuse)
    module = import_source(text())
    assert module.value() == "emitted"
    assert inspect.getsource(module.value).startswith("def value")
    assert [path for path in cache_folder(FOLDER).iterdir() if path.suffix != ".py"] == []


def test_triton_reads_what_has_no_file(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(folders.tempfile, "mkstemp", refuse)
    module = import_source(f"from triton import jit\nNUMBER = {os.getpid()}\n\n@jit\ndef f(x):\n    return x + 1\n")
    assert "return x + 1" in module.f.src
    assert module.f.cache_key


def test_what_a_process_left_unfinished_is_removed(folder: pathlib.Path) -> None:
    made = cache_folder(FOLDER)
    for name, age in (("old.tmp", 2 * 3600), ("new.tmp", 60), ("old.py", 2 * 3600)):
        (made / name).touch()
        os.utime(made / name, (time.time() - age,) * 2)
    folders._sweep.cache_clear()
    cache_folder(FOLDER)
    assert {path.name for path in made.iterdir()} == {"new.tmp", "old.py"}
