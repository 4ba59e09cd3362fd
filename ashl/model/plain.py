"""Use a model of plain torch: a `torch.nn.Module` class, or a function that returns a module."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ashl.config.construct import Maker, bind_arguments
from ashl.errors import UsageError


@dataclass(frozen=True)
class PlainModel:
    """A maker of the module, and the keys that it is called with."""

    make: Maker
    keys: Mapping[str, Any]

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Return the module; the two arguments are passed if the maker has such parameters and no
        such keys.

        Raises: UsageError if the maker returns no module.
        """
        offered = {"sample_shape": sample_shape, "num_classes": num_classes}
        module = self.make(**bind_arguments(self.make, self.keys, "model", offered))
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"model: {self.make.__name__} returns {type(module).__name__}, and should return a"
                " torch.nn.Module"
            )
        return module


def plain_model(part: Maker, keys: Mapping[str, Any]) -> PlainModel | None:
    """Return the model of a class or a function; None for a class that is no module."""
    return (
        None
        if isinstance(part, type) and not issubclass(part, nn.Module)
        else PlainModel(part, keys)
    )
