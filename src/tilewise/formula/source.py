"""Emitted source, kept in a cache folder and run as a module.

What runs is the text that was emitted: a file that says something else is written anew, and no compiled file is read.
Triton finds a function's source by the module's file, or, where no folder can be had, by Python's cache of lines.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import linecache
import os
import pathlib
import stat
import sys
import tempfile
import threading
from types import ModuleType

from tilewise.core.errors import InputError

EMITTER_VERSION = 7
_lock = threading.RLock()


def import_source(source: str) -> ModuleType:
    """The module of this text, run once in a process; others that ask meanwhile wait. A failed one leaves nothing.

    Raises InputError where `$TILEWISE_CACHE` names a folder that cannot be used.
    """
    name = f"tilewise_emitted_{hashlib.sha256(source.encode()).hexdigest()[:24]}"
    known = sys.modules.get(name)
    if known is not None:
        return known
    with _lock:
        known = sys.modules.get(name)
        if known is None:
            known = _run(name, source)
            sys.modules[name] = known  # now that all of it has run
        return known


def _run(name: str, source: str) -> ModuleType:
    path = _written(name, source)
    module = ModuleType(name)
    module.__file__ = str(path)
    # inspect finds lines here first; None: they do not change, whatever happens to the file
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        linecache.cache.pop(str(path), None)
        raise
    return module


def _written(name: str, source: str) -> pathlib.Path:
    """The file with this text; where it cannot be written, a path that names none."""
    try:
        folder = cache_folder()
        path = folder / f"{name}.py"
        if not _holds(path, source):
            _replace(path, source)
    except OSError:  # read-only, full, or a folder of this name: the text is at hand
        return pathlib.Path(f"<{name}>")
    return path


def _replace(path: pathlib.Path, source: str) -> None:
    """Write a file that is there whole or not at all."""
    descriptor, written = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as handle:
            handle.write(source)
        os.replace(written, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(written)
        raise


def _holds(path: pathlib.Path, source: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == source
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def cache_folder() -> pathlib.Path:
    """Where emitted modules live: `$TILEWISE_CACHE`, else `~/.cache/tilewise`, else a temporary folder of this process.

    It belongs to this user, who alone may write there.

    Raises InputError where `$TILEWISE_CACHE` names what is no such folder, and cannot become one.
    """
    named = os.environ.get("TILEWISE_CACHE")
    if named:
        try:
            return _private(pathlib.Path(named))
        except OSError as wrong:
            raise InputError(
                "TILEWISE_CACHE",
                got=f"{named!r}: {wrong.strerror or wrong}",
                expected="a folder that is yours and can be written, or the name of a new one",
                hint="name another folder, or unset it: then ~/.cache/tilewise is used, or a temporary folder",
            ) from wrong
    try:
        return _private(pathlib.Path.home() / ".cache" / "tilewise")
    except (OSError, RuntimeError):  # no home, not ours, or read-only
        return _temporary()


def _private(root: pathlib.Path) -> pathlib.Path:
    """The folder of this version under `root`; OSError where it is not ours, or cannot be written."""
    folder = root / f"emitted-{EMITTER_VERSION}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(0, "a link or a file is in the way", str(folder))
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise PermissionError(0, "the folder belongs to another user", str(folder))
    if found.st_mode & 0o077:
        os.chmod(folder, 0o700)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(0, "the folder cannot be written", str(folder))
    return folder


@functools.cache
def _temporary() -> pathlib.Path:
    """A folder for as long as the process lives."""
    holder = tempfile.TemporaryDirectory(prefix="tilewise-", ignore_cleanup_errors=True)
    _holders.append(holder)
    return pathlib.Path(holder.name)


_holders: list[tempfile.TemporaryDirectory[str]] = []


def _after_fork() -> None:
    """A child has no thread that would free the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
