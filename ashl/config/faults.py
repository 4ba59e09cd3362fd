"""Attribution of exceptions to a part of the user's own, or to ashl.

`Guard` surrounds each call of a model, a loss, a metric, a data set or an optimizer. An exception
of these becomes one sentence with the part, the worker and the step, the exception and, for common
faults, the fix. Exceptions of ashl's own parts, and of ashl's own code during the call, are not
changed.
"""

import re
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from ashl.errors import AshlError, OwnFaultError

PACKAGE = Path(__file__).resolve().parents[1]
# modules of ashl that hooks of the user's parts call
MACHINERY = ("ashl.runtime.", "ashl.stage.", "ashl.topology.", "ashl.learn.pieces")
# parts of paths of installed libraries
LIBRARIES = ("site-packages", "dist-packages", "lib/python")
NO_MEMORY = ("allocate memory", "out of memory", "OutOfMemory", "MemoryError")
MEMORY_FIX = "there is not enough memory; take a smaller dataset.batch_size, data set or model"
HINTS = (  # words of an exception, and the fix
    ("use_reentrant", "pass use_reentrant=False to torch.utils.checkpoint"),
    (
        "LazyModule|uninitialized parameter|UninitializedParameter",
        "give lazy layers their sizes, for example nn.Linear(16, 4) in place of nn.LazyLinear(4)",
    ),
    (
        "does not require grad",
        (
            "the loss has no gradient: look for torch.no_grad(), .detach(), .data or .item() in"
            " forward and loss"
        ),
    ),
    (
        "more than 1 value per channel",
        "a norm needs more than one value; take dataset.batch_size=2 or more",
    ),
    (
        "inplace operation",
        "an operation in place changes what the backward pass needs; write x = x + y, not x += y",
    ),
    (
        "index out of range in self",
        "an index is beyond an embedding's size; make num_embeddings larger",
    ),
    (
        "same dtype, but got Long and Float",
        "these samples are whole numbers, such as tokens: take a model that embeds them, for"
        " example model=gpt",
    ),
    (
        r"Target -?\d+ is out of bounds",
        "a target is beyond the model's outputs; give the model more outputs",
    ),
    (
        "only for scalar outputs|only be implicitly created for scalar",
        "the loss should be one number; take its mean",
    ),
    ("|".join(NO_MEMORY), MEMORY_FIX),
)


class Guard:
    """Context that reports an exception inside as the fault of the first of `parts` that is the
    user's own.

    Args: `parts` are (group, dotted name), the called part first; `place` names worker and step; ""
    while the model is made, when the caller reports a lack of memory.
    """

    __slots__ = ("parts", "place")

    def __init__(self, parts: tuple[tuple[str, str], ...], place: str = "") -> None:
        self.parts, self.place = parts, place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, OwnFaultError) and self.place not in error.place:
            error.place = f"{error.place}, {self.place}"
        if (
            not isinstance(error, Exception | SystemExit)  # no part of a run may end the process
            or isinstance(error, AshlError)
            or is_from_callback(trace)
        ):
            return
        if is_out_of_memory(error):
            if not self.place:
                return
            raise AshlError(f"{self.place}: {MEMORY_FIX} ({error_text(error)})") from error
        own = next(
            (part for part in self.parts if part[1] and not part[1].startswith("ashl.")), None
        )
        if own is None:
            return
        group, name = self.parts[0]
        doing = "" if own == self.parts[0] else f" with {group} {name.removeprefix('ashl.')}"
        raise OwnFaultError(
            f"{own[0]} {own[1]}{doing}", self.place, located_error_text(error), hint_for(error)
        ) from error


def is_from_callback(trace: TracebackType | None) -> bool:
    """Return True if ashl's own machinery, called by a hook inside, raised the exception."""
    return any(
        frame.f_globals.get("__name__", "").startswith(MACHINERY)
        for frame, _ in traceback.walk_tb(trace)
    )


def error_text(error: BaseException) -> str:
    """Return the class of an exception and its message, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def located_error_text(error: BaseException) -> str:
    """Return `error_text` with the user's file and line that raised the exception."""
    place = user_line(error)
    return error_text(error) + (f" ({place})" if place else "")


def user_line(error: BaseException) -> str:
    """Return file and line of the innermost frame outside of ashl and installed libraries; "" if
    none.
    """
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        library = file.startswith("<frozen") or any(part in file for part in LIBRARIES)
        if not library and not Path(file).is_relative_to(PACKAGE):
            found = f"{file}, line {line}"
    return found


def hint_for(error: BaseException) -> str:
    """Return the fix of a common fault; "" for any other."""
    text = error_text(error)
    return next((hint for words, hint in HINTS if re.search(words, text)), "")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the memory of the host or of a device was exhausted."""
    return isinstance(error, MemoryError) or any(words in error_text(error) for words in NO_MEMORY)
