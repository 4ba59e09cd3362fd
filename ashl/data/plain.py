"""Use a data set of plain torch: a map-style `torch.utils.data.Dataset`, or a function that
returns two.
"""

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ashl.config.construct import Maker, bind_arguments
from ashl.config.faults import hint_for, is_out_of_memory, located_error_text
from ashl.data.dataset import Data, Dataset, Split
from ashl.errors import AshlError, OwnFaultError, UsageError
from ashl.option import known_fields, option

MAX_NAMES = 5  # most classes in a note
MAX_TOKENS = 10**7  # most words of a vocabulary


@option
class PlainDataset(Dataset):
    """A maker of the two halves, and the keys that it is called with.

    It is called with `train=True` and `train=False` if it has that parameter, else once for a pair
    (train, test).
    """

    make: Maker
    keys: dict[str, Any]

    def load(self) -> Data:
        """Read every target now, and each input at its use. Raises UsageError."""
        if self.makes_halves:
            return self.data_of(self.make_half(train=True), self.make_half(train=False))
        pair: Any = self.make(**bind_arguments(self.make, self.keys, "dataset", {}))
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            name = self.make.__name__
            raise UsageError(
                f"dataset: {name} should take train=True or False, or return a pair (train, test)"
            )
        return self.data_of(*pair)

    @property
    def makes_halves(self) -> bool:
        """Return True if the maker is called once for each half."""
        return "train" in signature(self.make).parameters

    def make_half(self, *, train: bool) -> Any:
        """Return one half as the maker returns it."""
        return self.make(**bind_arguments(self.make, self.keys, "dataset", {"train": train}))

    def data_of(self, *halves: Any) -> Data:
        """Return the data of a training half and a test half. Raises UsageError."""
        name = self.make.__name__
        train, test = (split_of(half, name) for half in halves)
        first, of_test = (half.batch(np.zeros(1, np.int64)) for half in (train, test))
        check_same_form(first, of_test, name)
        inputs, targets = first
        notes: tuple[str, ...] = ()
        if targets.is_floating_point():
            outputs = math.prod(targets.shape[1:])
        elif targets.ndim == 1:
            outputs, notes = count_classes([train.targets, test.targets], name)
        else:  # tokens: as many as there are words in targets and inputs
            known = [half.targets for half in (train, test)]
            known += [
                half.inputs[torch.arange(len(half))]
                for half in (train, test)
                if not inputs.is_floating_point()
            ]
            outputs = int(max(part.max() for part in known)) + 1
            if outputs > MAX_TOKENS:
                raise UsageError(
                    f"dataset: a token of {name} is {outputs - 1}; number tokens from 0 on, up to"
                    f" {MAX_TOKENS - 1}"
                )
        shape, source = tuple(inputs.shape[1:]), f"{self.make.__module__}.{name}"
        return Data(
            train, test, sample_shape=shape, num_classes=outputs, source=source, notes=notes
        )


def check_same_form(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], name: str) -> None:
    """Refuse halves whose first samples differ in shape or kind. Raises: UsageError."""
    for what, parts in zip(("inputs", "targets"), zip(train, test, strict=True), strict=True):
        forms = [f"{tuple(part.shape[1:])} of {str(part.dtype)[6:]}" for part in parts]
        if forms[0] != forms[1]:
            raise UsageError(
                f"dataset: the {what} of {name} are {forms[0]} in the training half and"
                f" {forms[1]} in the test half; give both the same shape and type"
            )


def plain_dataset(part: Maker, keys: Mapping[str, Any]) -> PlainDataset | None:
    """Return the data set of a class or a function; None for a class that is no torch data set."""
    if isinstance(part, type) and not issubclass(part, TorchDataset):
        return None
    own = known_fields(Dataset)
    own_keys = {key: value for key, value in keys.items() if key in own}
    return PlainDataset(
        make=part, keys={key: value for key, value in keys.items() if key not in own}, **own_keys
    )


class Items:
    """Inputs that are read one by one at each use; random ones are drawn again each time."""

    def __init__(self, half: Any, name: str) -> None:
        self._half, self._name = half, name

    def __getitem__(self, index: Tensor, /) -> Tensor:
        items = [
            tensor_of(item_of(self._half, number, self._name)[0], f"{self._name}'s input {number}")
            for number in index.tolist()
        ]
        return stack_parts(items, f"{self._name}'s inputs")


def count_classes(halves: Sequence[Tensor], name: str) -> tuple[int, tuple[str, ...]]:
    """Return how many outputs these classes need, and a note about numbers without a sample.

    Raises: UsageError if fewer than half of the numbers are classes: each unused one would cost
    memory and learn nothing.
    """
    present = [int(value) for value in torch.unique(torch.cat(list(halves))) if value >= 0]
    outputs = max(present, default=-1) + 1
    missing = outputs - len(present)
    if outputs <= 0:
        raise UsageError(f"dataset: {name} has no class; number classes from 0 on")
    if missing > len(present):
        raise UsageError(
            f"dataset: the classes of {name} are {len(present)} numbers from {present[0]} to"
            f" {present[-1]}; number them from 0 to {len(present) - 1}, as torch.unique(targets,"
            " return_inverse=True)[1] does"
        )
    if not missing:
        return outputs, ()
    here = set(present)
    absent = [number for number in range(outputs) if number not in here]
    named = ", ".join(map(str, absent[:MAX_NAMES])) + (", ..." if len(absent) > MAX_NAMES else "")
    return outputs, (
        f"no sample of {name} is of class {named}; the model has {outputs} outputs all the same",
    )


def split_of(half: Any, name: str) -> Split:
    """Return one half. Raises UsageError if it is not a sequence of pairs (input, target)."""
    try:
        count = len(half)
        first = half[0] if count else None
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise UsageError(
            f"dataset: {name} needs a length and items by number, and at least one"
            f" ({located_error_text(error)})"
        ) from error
    if not count:
        raise UsageError(
            f"dataset: {name} has a half without items; the training half and the test half need"
            " at least one each"
        )
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise UsageError(f"dataset: an item of {name} should be a pair (input, target)")
    targets = [
        tensor_of(item_of(half, number, name)[1], f"{name}'s target {number}")
        for number in range(count)
    ]
    together = stack_parts(targets, f"{name}'s targets")
    if together.is_floating_point() and together.ndim == 1:
        together = together[:, None]  # as a model has its one output
    return Split(Items(half, name), together)


def item_of(half: Any, number: int, name: str) -> Any:
    """Return an item. Raises UsageError if it does not exist or is no pair."""
    try:
        item = half[number]
    except AshlError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise OwnFaultError(
            f"dataset {name}", f"item {number}", located_error_text(error), hint_for(error)
        ) from error
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise UsageError(
            f"dataset: item {number} of {name} is {type(item).__name__}; make it a pair (input,"
            " target)"
        )
    return item


def tensor_of(value: Any, what: str) -> Tensor:
    """Return a value as a float32 or int64 tensor. Raises UsageError for any other value."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"dataset: {what} is {type(value).__name__}; give a tensor, an array or a number"
        ) from error
    if tensor.dtype in (torch.uint8, torch.bool):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UsageError(
            f"dataset: {what} is {kind}; give float32, as x / 255, or int64 for classes and tokens"
        )
    if tensor.is_complex():
        raise UsageError(
            f"dataset: {what} is complex; give its real and imaginary parts as float32, as"
            " torch.view_as_real does"
        )
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def stack_parts(parts: list[Tensor], what: str) -> Tensor:
    if len({part.shape for part in parts}) > 1:
        shapes = " and ".join(sorted({str(tuple(part.shape)) for part in parts})[:2])
        raise UsageError(
            f"dataset: {what} differ in shape, for example {shapes}; give all the same shape"
        )
    return torch.stack(parts)
