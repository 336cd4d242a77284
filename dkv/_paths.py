"""Paths that are read are regular files; a file that is written appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
import uuid
from collections.abc import Iterator

STALE_SECONDS = 86_400  # after which what a killed process left is removed
MARK = ".dkv-"


def check_path(path: str | bytes | os.PathLike[str]) -> str:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path must be a string or a path, got {type(path).__qualname__}")
    name = os.fsdecode(path)
    if not name or "\0" in name:
        raise ValueError(f"path must be a name without NUL bytes, got {name!r:.60}")
    return name


def readable(path: str | bytes | os.PathLike[str]) -> str:
    """The name of a regular file, links followed; a pipe would wait and a device might never end."""
    name = check_path(path)
    try:
        mode = os.stat(name).st_mode
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no such file: {name}") from error
    if not stat.S_ISREG(mode):
        raise ValueError(f"{name} is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}, not a file to read")
    return name


@contextlib.contextmanager
def replaced(path: str | bytes | os.PathLike[str], suffix: str = ".part") -> Iterator[str]:
    """A temporary name in the same folder; what was written there takes the place of ``path``, whole or not at all.

    A link stays one and its target is replaced; the permission bits of a file that was there stay.

    Raises
    ------
    ValueError
        When there is something else than a regular file.
    OSError
        As the system says; nothing is left behind and what was there is as before.
    """
    target = os.path.realpath(check_path(path))
    folder = os.path.dirname(target)
    bits = _bits(target)
    remove_stale(folder, MARK)
    temporary = os.path.join(folder, f"{MARK}{uuid.uuid4().hex}{suffix}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            if bits is not None:
                os.fchmod(file.fileno(), bits)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def remove_stale(folder: str | os.PathLike[str], prefix: str) -> None:
    """Remove temporary files that a killed process left in a folder more than a day ago."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_SECONDS:
                        os.unlink(entry.path)


def _bits(target: str) -> int | None:
    """Permission bits of a file that may be replaced; None where there is none."""
    try:
        found = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):
        raise ValueError(f"{target} is {'a folder' if stat.S_ISDIR(found) else 'no regular file'}, not one to replace")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)
    return stat.S_IMODE(found)


def _sync_folder(folder: str) -> None:
    """The new name outlives a power cut too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
