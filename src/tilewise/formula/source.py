"""Emitted source, kept in a cache folder and run as a module.

What runs is the text that was emitted: a file that says something else is written anew, and no compiled file is read.
Triton finds a function's source by the module's file, or, where no folder can be had, by Python's cache of lines.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import pathlib
import sys
import threading
from types import ModuleType

from tilewise.core.cache_folder import cache_folder, replace

FOLDER = "emitted-7"  # a new number where the emitter writes other text for the same formula
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
        folder = cache_folder(FOLDER)
        path = folder / f"{name}.py"
        if not _holds(path, source):
            replace(path, source)
    except OSError:  # read-only, full, or a folder of this name: the text is at hand
        return pathlib.Path(f"<{name}>")
    return path


def _holds(path: pathlib.Path, source: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == source
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _after_fork() -> None:
    """A child has no thread that would free the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
