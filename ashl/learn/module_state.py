"""Carry the buffers and frozen parameters that training changes, for each worker.

Rule: state that a forward pass changes belongs to each worker. One module serves all workers of a
process, so this state is exchanged when another worker computes. An evaluation uses the mean over
the workers for floating-point tensors, and the first worker's tensor for others. State that no
forward pass changes is common to all workers.

Limits: the try-out before the run decides. If it changes a tensor, all buffers are carried, and the
frozen parameters that it has changed.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

State = Mapping[str, Tensor]  # by the name in the module; tensors are never changed


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name, including those that no `state_dict` contains."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def state_of(module: nn.Module, apart: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the frozen parameters and the buffers of a module.

    Args: apart has the paths of submodules whose buffers are left out.
    """
    buffers = {name for name, _ in module.named_buffers() if name.rpartition(".")[0] not in apart}
    return {
        name: value
        for name, value in named_tensors(module).items()
        if (not value.requires_grad if isinstance(value, nn.Parameter) else name in buffers)
    }


def copy_state(module: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Return copies of these tensors of a module."""
    found = named_tensors(module)
    return {name: found[name].detach().clone() for name in names}


def set_state(module: nn.Module, state: State) -> None:
    """Set the tensors of a module to those of a state."""
    found = named_tensors(module)
    for name, value in state.items():
        found[name].data = value.clone()


def mark_tensors(module: nn.Module) -> dict[str, tuple[int, Tensor]]:
    """Return how often each tensor of a module has been written to, and a copy, by name."""
    found = named_tensors(module)
    return {name: (value._version, value.detach().clone()) for name, value in found.items()}


def find_written(before: Mapping[str, tuple[int, Tensor]], module: nn.Module) -> set[str]:
    """Return the names of the tensors that were written to or replaced since `mark_tensors`."""
    after = named_tensors(module)
    return {
        name
        for name, (version, value) in before.items()
        if after[name]._version != version or not torch.equal(after[name], value)
    }


def mean_of(states: Sequence[State]) -> State:
    """Return the mean over workers of floating-point tensors, computed in double precision.

    Other tensors are those of the first worker.
    """
    found = dict(states[0])
    for name, first in found.items():
        if first.is_floating_point() and len(states) > 1:
            total = torch.zeros_like(first, dtype=torch.float64)
            for state in states:
                total += state[name]
            found[name] = (total / len(states)).to(first.dtype)
    return found


class Carrier:
    """The state of each worker for one module that serves all of them in turn; one thread
    computes.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        """`names` are those of the tensors that forward passes change; `module` has their first
        values.
        """
        self._names = names
        self._first = copy_state(module, names)
        self._kept: dict[int, State] = {}  # of workers that have computed
        self._resident: int | None = None  # the worker whose state the module has

    def load_worker(self, module: nn.Module, worker: int) -> None:
        """Give the module the state of this worker."""
        if self._resident != worker:
            self.save_worker(module)
            set_state(module, self._kept.get(worker, self._first))
            self._resident = worker

    def save_worker(self, module: nn.Module) -> None:
        """Keep the state of the worker that computed last; the module's may be changed
        afterwards.
        """
        if self._resident is not None:
            self._kept[self._resident] = copy_state(module, self._names)
        self._resident = None

    def load_mean(self, module: nn.Module) -> None:
        """Give the module the workers' mean, for an evaluation."""
        self.save_worker(module)
        set_state(module, self.mean())

    def state_of_worker(self, module: nn.Module, worker: int) -> State | None:
        """Return the state of a worker; None if it is the first one."""
        if self._resident == worker:
            return copy_state(module, self._names)
        return self._kept.get(worker)

    def set_worker_state(self, worker: int, state: State | None) -> None:
        """Set the state of a worker; None is the first one."""
        if self._resident == worker:
            self._resident = None
        self._kept.pop(worker, None)
        if state is not None:
            self._kept[worker] = state

    def mean(self) -> State:
        """Return the mean over the workers that have computed, in the order of their ranks."""
        states = [state for _, state in sorted(self._kept.items())]
        return mean_of(states) if states else self._first
