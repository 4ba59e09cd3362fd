"""A model as plain torch has it: a `torch.nn.Module` class, or a function that returns a module."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ashl.config.construct import Maker, arguments
from ashl.errors import UsageError


@dataclass(frozen=True)
class PlainModel:
    """What makes the module, and the keys that it is called with."""

    make: Maker
    keys: Mapping[str, Any]

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Of the two arguments those are passed on for which there is a parameter and no key.
        Raises UsageError.
        """
        offered = {"sample_shape": sample_shape, "num_classes": num_classes}
        module = self.make(**arguments(self.make, self.keys, "model", offered))
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"model: {self.make.__name__} returns {type(module).__name__}, and should return a"
                " torch.nn.Module"
            )
        return module


def plain_model(part: Maker, keys: Mapping[str, Any]) -> PlainModel | None:
    """The model that a class or a function makes; None for a class that is no module."""
    return (
        None
        if isinstance(part, type) and not issubclass(part, nn.Module)
        else PlainModel(part, keys)
    )
