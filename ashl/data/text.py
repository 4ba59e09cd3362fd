"""Load text as tokens (characters or bytes) for next-token prediction."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ashl.data.dataset import Data, Dataset, Split, resolve_root
from ashl.errors import DataMissingError, UsageError
from ashl.option import Count, Positive, option

TEST = 10  # one of so many samples, the last ones, is for testing
BYTES = 256
STDLIB = "stdlib"
# Folders of Python's library that do not belong to the standard library's text.
OTHERS = {"site-packages", "dist-packages", "test", "tests", "idlelib"}


@option
class Text(Dataset):
    """A text divided into samples of `sequence_length` tokens; targets are the inputs shifted by
    one token.

    The last tenth of the samples is for testing. Without a path the text is the language reference
    that comes with Python. With `path=stdlib` it is the sources of Python's standard library, which
    differ between versions. For a folder it is all UTF-8 files below it, by name.
    """

    path: str | None
    tokenizer: Literal["characters", "bytes"]
    sequence_length: Count
    max_mb: Positive | None

    def load(self) -> Data:
        """Return the samples.

        Raises: DataMissingError if there is nothing to read; UsageError if the text is too short.
        """
        text = self.read()
        numbers, words = number_tokens(text, self.tokenizer)
        count = (len(numbers) - 1) // self.sequence_length
        if count < TEST:
            raise UsageError(
                f"dataset.sequence_length={self.sequence_length} makes {count} samples of"
                f" {len(numbers)} tokens (dataset.tokenizer={self.tokenizer}); take a shorter one"
            )
        tokens = torch.from_numpy(numbers)

        def rows(first: int) -> Tensor:
            return tokens[first : first + count * self.sequence_length].view(
                count, self.sequence_length
            )

        inputs, targets, train = rows(0), rows(1), count - count // TEST
        halves = (
            Split(inputs[part], targets[part]) for part in (slice(train), slice(train, count))
        )
        return Data(*halves, sample_shape=(self.sequence_length,), num_classes=words)

    def read(self) -> bytes:
        """Return the text as UTF-8, of at most `max_mb` MB."""
        most = None if self.max_mb is None else int(self.max_mb * 1e6)
        if self.path is None:
            from pydoc_data.topics import topics

            return truncate_text("\n".join(topics[name] for name in sorted(topics)).encode(), most)
        stdlib = self.path == STDLIB
        path = Path(sysconfig.get_paths()["stdlib"]) if stdlib else resolve_root(self.path)
        if not path.is_dir():
            try:
                whole = path.read_bytes()
                whole.decode()
            except (OSError, UnicodeDecodeError) as error:
                raise DataMissingError(
                    f"dataset.path={self.path} is no text that can be read ({error})"
                ) from error
            return truncate_text(whole, most)
        parts, size = [], 0
        for part in read_texts(path, stdlib):
            parts.append(part)
            size += len(part) + 1
            if most is not None and size > most:
                break
        if not parts:
            raise DataMissingError(
                f"dataset.path={self.path} is a folder without a file of UTF-8; give another one"
            )
        return truncate_text(b"\n".join(parts), most)


def number_tokens(text: bytes, tokens: str) -> tuple[np.ndarray, int]:
    """Return a number for each token, int64, and the size of the vocabulary.

    Bytes are their own numbers, and characters are numbered in their order.
    """
    if tokens == "bytes":
        return np.frombuffer(text, np.uint8).astype(np.int64), BYTES
    characters, numbers = np.unique(
        np.frombuffer(text.decode().encode("utf-32-le"), "<u4"), return_inverse=True
    )
    return numbers.astype(np.int64, copy=False), len(characters)


def truncate_text(text: bytes, most: int | None) -> bytes:
    """Return at most `most` bytes of a text, up to the end of a character."""
    return (
        text if most is None or len(text) <= most else text[:most].decode(errors="ignore").encode()
    )


def read_texts(folder: Path, stdlib: bool) -> Iterator[bytes]:
    """Yield the UTF-8 files below a folder, by name, without hidden ones.

    For the standard library these are its modules, without their tests.
    """
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or (stdlib and path.name in OTHERS):
            continue
        if path.is_dir():
            yield from read_texts(path, stdlib)
        elif path.is_file() and (not stdlib or path.suffix == ".py"):
            try:
                content = path.read_bytes()
                content.decode()
            except (OSError, UnicodeDecodeError):
                continue
            yield content
