"""Compiled kernels on disk, shared by processes.

An entry is three files: `<entry>.cu` (the source, to look at), `<entry>.cubin`, and
`<entry>.sha256`, which `sha256sum --check` reads, too. The entry's name ends in a hash of all that
determines the cubin, and of no path or date, so that an entry never goes out of date.

Who misses takes the entry's lock, looks again, and only then compiles and writes. Each file is
written under a name of its own, synced, and renamed, the checksum last: a reader needs no lock, and
takes an entry without a matching checksum for a miss. Where locks do not work (some network file
systems), every process compiles for itself, uses its own cubin, and the last rename wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from deep_gemm.config import settings, warn_once
from deep_gemm.jit.codegen import KernelSource

_SCHEMA = 1  # of the key and the files
_LOCK_SECONDS = 60  # a compilation takes less than a second; a longer wait is for a dead process


class Places(NamedTuple):
    """Where entries are looked for, and the directory for new ones, None if there is none."""

    read: tuple[Path, ...]
    write: Path | None


def places() -> Places:
    """The cache directories that can be used now; warns once when the wanted one cannot.

    The wanted directory (`settings.jit_cache_dir`) is made if need be. It is refused if it belongs
    to another user and others than its owner may write to it, since a cubin is code; if it is
    merely read-only, it is read. New entries then go to a private directory for temporary files.
    """
    if settings.jit_disable_cache:
        return Places((), None)
    read: list[Path] = []
    reasons: list[str] = []
    write = None
    for directory, is_private in ((settings.jit_cache_dir, False), (_temporary(), True)):
        if directory is None:
            continue
        try:
            directory.mkdir(mode=0o700 if is_private else 0o755, parents=True, exist_ok=True)
            _check_owner(directory, is_private)
            read.append(directory)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError("it is not writable")
        except OSError as error:
            reasons.append(f"{directory} ({error.strerror or error})")
        else:
            write = directory
            break
    if write is None or write != settings.jit_cache_dir:
        cannot = " and ".join(reasons) or "a directory below the home directory, as there is none"
        instead = f"in {write}" if write else "only as long as this process runs"
        warn_once(
            f"kernels cannot be cached in {cannot}; they are kept {instead}. "
            "Set DG_JIT_CACHE_DIR to a directory that is yours"
        )
    return Places(tuple(read), write)


def key(source: KernelSource, options: Sequence[str], compiler_version: str) -> str:
    """A hash of everything that determines the cubin (the options name the architecture)."""
    parts = [_SCHEMA, source.name, source.text, source.headers, list(options), compiler_version]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def load(entry: str) -> bytes | None:
    """The cubin of `entry`, None if there is none or it is damaged."""
    for directory in places().read:
        with suppress(OSError, ValueError):
            cubin = (directory / f"{entry}.cubin").read_bytes()
            if (directory / f"{entry}.sha256").read_text() == _checksum(entry, cubin):
                return cubin
    return None


def store(entry: str, text: str, cubin: bytes) -> None:
    """Write the files of `entry`; a full disk or the like gives one warning and no error."""
    files = {".cu": text.encode(), ".cubin": cubin, ".sha256": _checksum(entry, cubin).encode()}
    for suffix, data in files.items():
        if write(entry + suffix, data) is None:
            return


def write(name: str, data: bytes) -> Path | None:
    """Write one file as a whole; its path, None if that was not possible."""
    directory = places().write
    if directory is None:
        return None
    temporary = directory / f".{name}.{os.getpid()}.{uuid.uuid4().hex}"
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(directory / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        warn_once(f"compiled kernels cannot be kept in {directory}: {error.strerror or error}")
        return None
    return directory / name


@contextmanager
def lock(entry: str) -> Iterator[None]:
    """Keep other processes from compiling `entry`, if locks work in the cache directory."""
    directory = places().write
    if directory is None:
        yield
        return
    import filelock  # on a miss only: it takes longer to import than a hit takes

    file_lock = filelock.FileLock(directory / f"{entry}.lock", timeout=_LOCK_SECONDS)
    with suppress(OSError, NotImplementedError):  # a timeout is an OSError
        file_lock.acquire()
    try:
        yield
    finally:
        with suppress(OSError):
            file_lock.release()  # does nothing if it is not held


def _checksum(entry: str, cubin: bytes) -> str:
    return f"{hashlib.sha256(cubin).hexdigest()}  {entry}.cubin\n"


def _temporary() -> Path | None:
    try:
        return Path(tempfile.gettempdir(), f"deep_gemm-{os.geteuid()}")
    except OSError:  # no directory for temporary files at all
        return None


def _check_owner(directory: Path, is_private: bool) -> None:
    """Raise PermissionError if someone else could have put files into `directory`."""
    # A private directory lies where everyone can make a link or a directory of its name.
    status = directory.lstat() if is_private else directory.stat()
    if status.st_uid == os.geteuid():
        return
    if is_private or stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"it belongs to user {status.st_uid}, and others may write to it")
