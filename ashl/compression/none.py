"""No compression: the dense float32 vector, 32 bits per element. Source: the baseline of every compression paper."""

from __future__ import annotations

from typing import Any, ClassVar

from ashl.option import option


@option
class Dense:
    """What goes in comes out."""

    unbiased: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def encode(self, sender: Any, update: Any) -> tuple[Any, Any]:
        return sender, update

    def decode(self, receiver: Any, body: Any) -> tuple[Any, Any]:
        return receiver, body

    def undo(self, sender: Any, body: Any) -> Any:
        return sender
