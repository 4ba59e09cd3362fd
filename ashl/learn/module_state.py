"""Carry the state of a module besides its trainable parameters, for each worker.

The state is frozen parameters, buffers and plain attributes.

Rule: state that a forward pass changes belongs to each worker. One module serves all workers of a
process, so this state is exchanged when another worker computes. An evaluation uses the mean over
the workers for floating-point values, and the first worker's value for others. State that no
forward pass changes is common to all workers.
"""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Key = tuple[str, str, str]  # kind, path of the submodule, name
State = dict[Key, Any]

PARAMETER, BUFFER, ATTRIBUTE = "parameter", "buffer", "attribute"
OWN = frozenset(vars(nn.Module()))  # attributes of every module
PLAIN = (bool, int, float, str, type(None))
CONTAINERS = (list, tuple, set, deque)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name, including those that no `state_dict` contains."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def state_of(module: nn.Module, apart: Collection[str] = ()) -> State:
    """Return the state of a module besides its trainable parameters.

    Args: apart has the paths of submodules whose buffers are left out.
    """
    found: State = {}
    for path, part in module.named_modules():
        for name, value in part.named_parameters(recurse=False):
            if not value.requires_grad and not nn.parameter.is_lazy(value):
                found[PARAMETER, path, name] = value
        for name, value in part.named_buffers(recurse=False) if path not in apart else ():
            if not nn.parameter.is_lazy(value):
                found[BUFFER, path, name] = value
        for name, value in attributes(part):
            found[ATTRIBUTE, path, name] = value
    return found


def attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes of a user's own class; those of torch's layers never change."""
    if not type(part).__module__.startswith("torch."):
        for name, value in vars(part).items():
            if name not in OWN and is_plain(value):
                yield name, value


def is_plain(value: Any) -> bool:
    """Return True for numbers, text, tensors without a graph, and containers of these."""
    if isinstance(value, Tensor):
        return not value.requires_grad
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return type(value) in PLAIN or (type(value) in CONTAINERS and all(map(is_plain, value)))


def copy_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def is_same(one: Any, other: Any) -> bool:
    """Return True if two plain values are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other


def find_changed(before: State, after: State) -> frozenset[Key]:
    """Return the keys of values that differ or exist in one state only."""
    return frozenset(
        key
        for key in before.keys() | after.keys()
        if key not in before or key not in after or not is_same(before[key], after[key])
    )


def values_by_name(module: nn.Module, kind: str, path: str) -> dict[str, Any]:
    """Return the dict in which a submodule holds its values of this kind."""
    part: Any = module.get_submodule(path)
    return {PARAMETER: part._parameters, BUFFER: part._buffers, ATTRIBUTE: vars(part)}[kind]


def set_value(module: nn.Module, key: Key, state: State) -> None:
    """Set a value of a module to that of a state; remove it if the state has none."""
    kind, path, name = key
    held = values_by_name(module, kind, path)
    if key not in state:
        # A value that is not plain holds a graph, which belongs to one step.
        if kind != ATTRIBUTE or is_plain(held.get(name)):
            held.pop(name, None)
        return
    value, there = state[key], held.get(name)
    if not isinstance(value, Tensor):
        held[name] = copy.deepcopy(value)
    elif (
        kind != ATTRIBUTE
        and isinstance(there, Tensor)
        and (there.shape, there.dtype) == (value.shape, value.dtype)
    ):
        there.detach().copy_(value)
    else:
        where = (
            next(module.parameters()).device
            if there is None or not isinstance(there, Tensor)
            else there.device
        )
        fresh = value.to(where, copy=True)
        held[name] = nn.Parameter(fresh, requires_grad=False) if kind == PARAMETER else fresh


def mean_of(states: Sequence[State]) -> State:
    """Return the mean over workers of floating-point values, computed in double precision.

    Other values are those of the first worker.
    """
    found: State = {}
    for key in dict.fromkeys(key for state in states for key in state):
        values = [state[key] for state in states if key in state]
        found[key] = values[0]
        if all(type(value) is float for value in values):
            found[key] = sum(values) / len(values)
        elif len(values) > 1 and have_one_shape(values):
            total = torch.zeros_like(values[0], dtype=torch.float64)
            for value in values:
                total += value
            found[key] = (total / len(values)).to(values[0].dtype)
    return found


def have_one_shape(values: Sequence[Any]) -> bool:
    """Return True for floating-point tensors of one shape."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return len(tensors) == len(values) and len({value.shape for value in tensors}) == 1


class Carrier:
    """The state of each worker for one module that serves all of them in turn; one thread
    computes.
    """

    def __init__(
        self, names: Collection[Key], build: Callable[[], nn.Module], apart: Collection[str]
    ) -> None:
        """`names` are the keys that forward is known to change; `build` makes the module in its
        first state.
        """
        self.names = frozenset(names)
        self._build, self._apart = build, apart
        self._first: State | None = None
        self._kept: dict[int, State] = {}  # of workers that have computed; values are never changed
        self._resident: int | None = None  # the worker whose state the module has
        # Marks of all other values, by which a change is noticed.
        self._watched: dict[Key, Any] | None = None
        # The same marks, arranged for a fast check.
        self._places: list[tuple[Mapping[str, Any], int, list[tuple[str, Any]]]] | None = None

    def load_worker(self, module: nn.Module, worker: int) -> None:
        """Give the module the state of this worker."""
        if self._resident == worker:
            return
        self.save_worker(module)
        if self.names:
            self._load(module, self._kept.get(worker, self.first_state))
        self._resident = worker

    def save_worker(self, module: nn.Module) -> None:
        """Keep the state of the worker that computed last; the module's may be changed
        afterwards.
        """
        if self._resident is not None and self.names:
            self._kept[self._resident] = self._copy_state(module)
        self._resident = None

    def load_mean(self, module: nn.Module) -> None:
        """Give the module the workers' mean, for an evaluation."""
        self.save_worker(module)
        if self.names:
            self._load(module, self.mean())

    def find_new_keys(self, module: nn.Module) -> None:
        """Check if the module has changed a value outside the known keys; carry it from now on."""
        if self._places is not None and all(
            len(held) == count and all(mark_of(held.get(name)) == mark for name, mark in marks)
            for held, count, marks in self._places
        ):
            return
        seen = {
            key: mark_of(value)
            for key, value in state_of(module, self._apart).items()
            if key not in self.names
        }
        if self._watched is not None:
            keys = seen.keys() | self._watched.keys()
            self._add(key for key in keys if seen.get(key, self) != self._watched.get(key, self))
        self._watched = {key: mark for key, mark in seen.items() if key not in self.names}
        marks: dict[tuple[str, str], list[tuple[str, Any]]] = {}
        for (kind, path, name), mark in self._watched.items():
            marks.setdefault((kind, path), []).append((name, mark))
        for path, part in module.named_modules():
            if not type(part).__module__.startswith("torch."):  # it may get new ones
                marks.setdefault((BUFFER, path), [])
                marks.setdefault((ATTRIBUTE, path), [])
        self._places = [
            (held := values_by_name(module, kind, path), len(held), found)
            for (kind, path), found in marks.items()
        ]

    def state_of_worker(self, module: nn.Module, worker: int) -> State | None:
        """Return the state of a worker; None if it is the first one."""
        if self._resident == worker and self.names:
            return self._copy_state(module)
        return self._kept.get(worker)

    def set_state(self, worker: int, state: State | None) -> None:
        """Set the state of a worker; None is the first one."""
        if self._resident == worker:
            self._resident = None
        self._kept.pop(worker, None)
        if state is not None:
            self._kept[worker] = state
            self._add(state.keys() - self.names)

    def mean(self) -> State:
        """Return the mean over the workers that have computed, in the order of their ranks."""
        return (
            mean_of([state for _, state in sorted(self._kept.items())])
            if self._kept
            else self.first_state
        )

    @property
    def first_state(self) -> State:
        """The first state of the carried keys."""
        if self._first is None:
            found = state_of(self._build(), self._apart)
            self._first = {key: copy_value(found[key]) for key in self.names if key in found}
        return self._first

    def constants(self, module: nn.Module) -> State:
        """Return the tensors that no forward pass has changed."""
        found = state_of(module, self._apart)
        return {
            key: x for key, x in found.items() if key not in self.names and isinstance(x, Tensor)
        }

    def _copy_state(self, module: nn.Module) -> State:
        found = state_of(module, self._apart)
        return {key: copy_value(found[key]) for key in self.names if key in found}

    def _load(self, module: nn.Module, state: State) -> None:
        for key in self.names:
            set_value(module, key, state)

    def _add(self, keys: Any) -> None:
        """Carry these keys, too; workers that are not computing get the first values."""
        new = frozenset(keys)
        self.names, self._first = self.names | new, None
        for worker, state in self._kept.items():
            self._kept[worker] = {
                key: self.first_state[key] for key in new if key in self.first_state
            } | state


def mark_of(value: Any) -> Any:
    """Return a mark that shows if a value has been changed or replaced."""
    if isinstance(value, Tensor):
        return id(value), value._version
    return value if type(value) in PLAIN else (id(value), len(value))


def set_values(module: nn.Module, state: Mapping[Key, Any]) -> None:
    """Set all values of a module that a state has."""
    for key in state:
        set_value(module, key, dict(state))
