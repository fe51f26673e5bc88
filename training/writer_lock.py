"""The lock of what one process at a time may write: a run's folder, shards of rows, a results file.

The lock file names its process. The OS releases the lock when that process ends, also by kill -9,
so that no stale lock remains. Readers need no lock. Part of train.py and generate.py. Needs POSIX
locks (flock); on a file system without them there is a warning, and no protection.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

LOCK = "writer.lock"
NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP


@contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """The lock of a folder's only writer. ValueError, with that process, if there is another."""
    with _locked(folder / LOCK, folder, "folder"):
        yield


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """The same of a file, by a hidden file beside it, which goes with the lock. A device or pipe
    has no lock."""
    path = path.resolve()  # two names of one file are one lock
    if path.exists() and not path.is_file():
        yield
        return
    lock = path.with_name(f".{path.name}.lock")
    with _locked(lock, path, "file"):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextmanager
def _locked(lock: Path, what: Path, kind: str) -> Iterator[None]:
    with _open_locked(lock, what, kind) as f:
        f.truncate(0)
        f.write(f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}\n")
        f.flush()
        yield


def _open_locked(lock: Path, what: Path, kind: str) -> IO[str]:
    while True:
        try:
            f = open(lock, "a+", encoding="utf-8")
        except OSError as e:
            error = f"{what}: cannot be written ({e.strerror}: {lock}); choose another {kind}"
            raise ValueError(error) from None
        try:
            _lock(f, what, kind)
        except OSError as e:
            if e.errno not in NO_LOCKS:
                raise
            print(
                f"{f.name}: this file system has no locks: start no other run on this {kind}",
                file=sys.stderr,
            )
        except ValueError:
            f.close()
            raise
        # its last owner may have removed it after it was opened here
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(f.fileno()), lock.stat()):
                return f
        f.close()


def _lock(file: IO[str], what: Path, kind: str) -> None:
    while not _try_lock(file, fcntl.LOCK_EX):
        # any number of readers share it for a moment (has_writer); a writer excludes them
        if not _try_lock(file, fcntl.LOCK_SH):
            file.seek(0)
            raise ValueError(
                f"{what}: another process is writing it "
                f"({file.read(200).strip()}); wait, stop it, or choose another {kind}"
            )
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(0.01)


def has_writer(folder: Path) -> bool:
    """Whether a process holds the folder's writer_lock."""
    try:
        with open(folder / LOCK, "rb") as f:
            return not _try_lock(f, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _try_lock(file: IO[Any], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
