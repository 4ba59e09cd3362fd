"""Read and write JSON Lines and JSON files that hold whole records at any time.

This also holds on a full disk and after a kill.
"""

import fcntl
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import to_json

from ashl.errors import load_json


class Lines:
    """A JSONL file that is being written.

    A line is one system call and is removed again if it did not fit, so that a reader or a kill
    finds whole lines only.

    Args: size = None creates the file; else writing continues after the first `size` bytes of an
    existing file.
    Raises: FileExistsError if the file exists already; BlockingIOError while another process writes
    it.
    """

    def __init__(self, path: Path, size: int | None = None):
        self.size = size or 0
        mode = "xb" if size is None else "r+b"
        self._file = open(path, mode, buffering=0)  # noqa: SIM115
        try:
            lock(self._file)
        except BlockingIOError:
            self._file.close()
            raise
        if size is not None:
            self._file.truncate(size)
            self._file.seek(size)

    def append(self, record: dict) -> None:
        """Append one line. Raises OSError, and leaves the file as it was."""
        line = dumps(record).encode() + b"\n"
        rest = memoryview(line)
        try:
            while rest:  # a full disk takes the first bytes and refuses the next call
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self.size)
            raise
        self.size += len(line)

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[dict]:
    """Yield the records of a JSONL file, without a last line that a kill has truncated.

    Raises: ValueError for a line that is no record.
    """
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                if not isinstance(record := load_json(line), dict):
                    raise ValueError(f"{path} has a line that is no record")
                yield record


def filter_lines(path: Path, size: int, wanted: Callable[[dict], bool]) -> bytes | None:
    """Filter the records in the first `size` bytes of a JSONL file; None if it is
    shorter.
    """
    if not path.exists() or path.stat().st_size < size:
        return None
    lines = path.read_bytes()[:size].splitlines(keepends=True)
    return b"".join(line for line in lines if wanted(load_json(line)))


@contextmanager
def hold_lock(path: Path) -> Generator[None, None, None]:
    """Hold the file's lock inside, if it exists.

    Raises: BlockingIOError if another process writes the file.
    """
    if not path.exists():
        yield
        return
    with open(path, "rb") as file:
        lock(file)
        yield


def lock(file: BinaryIO) -> None:
    """Lock a file until it is closed or this process ends in any way.

    Raises: BlockingIOError if another process has locked it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network file systems have no locks
        pass


def tail(path: Path, offset: int) -> tuple[list[dict], int]:
    """Return the records of a growing JSONL file from byte `offset` on, and the next offset.

    A missing file has no records. A file that was rewritten, because its run resumed from a
    checkpoint, is read from its beginning.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, offset - 1))
            text = file.read()
            if offset and not text.startswith(b"\n"):
                offset = 0
                file.seek(0)
                text = file.read()
    except FileNotFoundError:
        return [], offset
    text, _, _ = text[bool(offset) :].rpartition(b"\n")
    return [load_json(line) for line in text.splitlines()], offset + len(text) + bool(text)


def read_json(path: Path) -> dict | None:
    """Read the object in a JSON file; None if there is no complete one."""
    try:
        found = load_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, value: dict) -> None:
    """Write `value` as JSON, as a whole or not at all. Raises OSError."""
    write_bytes(path, f"{dumps(value, indent=2)}\n".encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it holds either its old or the whole new content. Raises OSError.

    A device or a pipe is written to, and never replaced by a file; so is the target of a link.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(content)
        return
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Open a file whose content replaces that of `path` at the end. Raises OSError."""
    target = Path(os.path.realpath(path))
    part = target.parent / f"{target.name}.part"
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        with suppress(OSError):  # a read-only file system raises here, too
            part.unlink(missing_ok=True)
        error.filename = str(path)  # a full disk is reported without it
        raise


def dumps(value: object, indent: int | None = None) -> str:
    """Return `value` as JSON.

    NaN and infinities, for which JSON has no literal, become null; scalars and arrays of numpy and
    torch become numbers and lists.
    """
    return to_json(value, indent=indent, inf_nan_mode="null", fallback=to_list).decode()


def to_list(value: Any) -> object:
    """Convert a scalar or an array of numpy or torch, neither of which is imported here."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"a record holds plain values only, not {type(value).__name__}")
    return value.tolist()
