"""Folders for what may be kept between processes: this user's, who alone may write there."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import stat
import tempfile
import time

from tilewise.core.errors import InputError

_ABANDONED = 3600.0  # seconds after which a file that was never finished is removed


def cache_folder(name: str) -> pathlib.Path:
    """The folder `name` in `$TILEWISE_CACHE`, else in `~/.cache/tilewise`, else a temporary one of this process.

    It belongs to this user, who alone may write there.

    Raises InputError where `$TILEWISE_CACHE` names what is no such folder, and cannot become one.
    """
    named = os.environ.get("TILEWISE_CACHE")
    if named:
        try:
            return _private(pathlib.Path(named), name)
        except OSError as wrong:
            raise InputError(
                "TILEWISE_CACHE",
                got=f"{named!r}: {wrong.strerror or wrong}",
                expected="a folder that is yours and can be written, or the name of a new one",
                hint="name another folder, or unset it: then ~/.cache/tilewise is used, or a temporary folder",
            ) from wrong
    try:
        return _private(pathlib.Path.home() / ".cache" / "tilewise", name)
    except (OSError, RuntimeError):  # no home, not ours, or read-only
        return _temporary(name)


def _private(root: pathlib.Path, name: str) -> pathlib.Path:
    """The folder of this name under `root`; OSError where it is not ours, or cannot be written."""
    folder = root / name
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
    _sweep(folder)
    return folder


@functools.cache
def _sweep(folder: pathlib.Path) -> None:
    """Remove, once in a process, what processes left that were ended while they wrote."""
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _ABANDONED:
                path.unlink()


@functools.cache
def _temporary(name: str) -> pathlib.Path:
    """A folder for as long as the process lives."""
    holder = tempfile.TemporaryDirectory(prefix=f"tilewise-{name}-", ignore_cleanup_errors=True)
    _holders.append(holder)
    return pathlib.Path(holder.name)


_holders: list[tempfile.TemporaryDirectory[str]] = []


def replace(path: pathlib.Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    descriptor, written = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as handle:
            handle.write(text)
        os.replace(written, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(written)
        raise
