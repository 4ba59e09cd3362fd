"""Use an optimizer of plain torch: a subclass of `torch.optim.Optimizer` that steps element by
element.

A step here is a function of flat vectors, and workers and servers may step on slices of a model. A
class of torch is an object with state, made for whole tensors. So each step makes a new object of
the class and gives it the state that the previous step left. A try-out compares a few steps of
vectors and slices with those of one lasting object on a matrix. It refuses a class for which they
differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ashl.config.construct import Maker
from ashl.config.faults import located_error_text
from ashl.errors import UsageError
from ashl.optimizer.contract import Moments, Optimizer
from ashl.optimizer.schedule import Scheduled
from ashl.option import option

# Keys of the learning rate, which the class does not receive.
OWN = ("schedule", "warmup_epochs", "horizon_epochs")
TRIED = (6, 4)  # shape of the matrix of the try-out
RATES = (1.0, 0.5, 2.0, 1.0, 0.25)  # shares of the learning rate at the steps of the try-out
TOLERANCE = 1e-5  # relative, of the try-out: vectors of other lengths round differently


class Held(NamedTuple):
    """A value that the class keeps from step to step.

    Args: kind is the type of a number (int, float or the dtype of a tensor []), or the dtype of a
    tensor with a value for each element (`each`).
    """

    name: str
    kind: Any
    each: bool


@option
class PlainOptimizer(Scheduled):
    """The steps of a class of torch; `keys` are the arguments of the class, `held` its state."""

    elementwise: ClassVar[bool] = True
    make: Maker
    keys: dict[str, Any]
    momentum: float
    held: tuple[Held, ...]

    def init(self, num_params: int) -> Moments:
        """Return the number of steps and the empty state; the state is not read before the first
        step.
        """
        return torch.zeros((), dtype=torch.int64), *(
            first_moment(held, num_params) for held in self.held
        )

    def step(
        self, moments: Moments, params: Tensor, grad: Tensor, lr: float
    ) -> tuple[Moments, Tensor]:
        """Return new moments and new parameters after one step on flat vectors [d]; arguments are
        unchanged.

        Elements with a different number of earlier steps, for example of parameters without a
        gradient in some steps, are stepped separately.
        """
        numbers = [moment for moment, each in zip(moments, self._each, strict=True) if not each]
        if not any(number.dim() for number in numbers):
            return self._step(moments, params, grad, lr)
        rows = torch.stack(
            [number.to(params.device, torch.float64).expand(len(params)) for number in numbers],
            dim=1,
        )
        found, row_of = torch.unique(rows, dim=0, return_inverse=True)
        moved = torch.empty_like(params)
        after = [
            torch.empty(len(params), dtype=moment.dtype, device=params.device) for moment in moments
        ]
        for row in range(len(found)):
            own = row_of == row
            part = tuple(
                moment[own] if each else (moment[own][0] if moment.dim() else moment)
                for moment, each in zip(moments, self._each, strict=True)
            )
            part, moved[own] = self._step(part, params[own], grad[own], lr)
            for all_values, values in zip(after, part, strict=True):
                all_values[own] = values.to(params.device)
        return tuple(after), moved

    @property
    def _each(self) -> tuple[bool, ...]:
        """True for each moment that has a value for each element."""
        return False, *(held.each for held in self.held)

    def _step(
        self, moments: Moments, params: Tensor, grad: Tensor, lr: float
    ) -> tuple[Moments, Tensor]:
        """Make the step of elements with the same number of earlier steps."""
        count, *kept = moments
        parameter = nn.Parameter(params.clone(), requires_grad=params.is_floating_point())
        optimizer = self.make([parameter], lr=self.lr, **self.keys)
        state = optimizer.state[parameter]
        if int(count):
            state |= {
                held.name: from_moment(held, value)
                for held, value in zip(self.held, kept, strict=True)
            }
        step_once(optimizer, parameter, grad.clone(), lr)
        after = tuple(as_moment(held, state[held.name]) for held in self.held)
        return (count + 1, *after), parameter.detach()


def first_moment(held: Held, num_params: int) -> Tensor:
    """Return the moment before the first step."""
    return (
        torch.zeros(num_params, dtype=held.kind)
        if held.each
        else torch.zeros((), dtype=dtype_of(held))
    )


def dtype_of(held: Held) -> torch.dtype:
    """Return the dtype in which a number is kept, exact for the type that the class uses."""
    whole = held.kind in (int, bool) or (
        isinstance(held.kind, torch.dtype) and not held.kind.is_floating_point
    )
    return torch.int64 if whole else torch.float64


def from_moment(held: Held, value: Tensor) -> Any:
    """Return a moment in the form of the class, without sharing memory."""
    if held.each:
        return value.clone()
    if isinstance(held.kind, torch.dtype):
        return value.to("cpu", held.kind, copy=True)
    return held.kind(value.item())


def as_moment(held: Held, value: Any) -> Tensor:
    """Return a value of the class's state as a moment."""
    if held.each:
        return value.detach()
    return torch.as_tensor(value).detach().to("cpu", dtype_of(held), copy=True)


def step_once(optimizer: torch.optim.Optimizer, parameter: Tensor, grad: Tensor, lr: float) -> None:
    """Make one step of the class with this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    parameter.grad = grad
    optimizer.step()


def plain_optimizer(part: Maker, keys: Mapping[str, Any]) -> PlainOptimizer | None:
    """Return the optimizer of a class of torch; None for any other class.

    Raises: UsageError if it cannot be made, or does not step element by element.
    """
    if not (isinstance(part, type) and issubclass(part, torch.optim.Optimizer)):
        return None
    name = f"optimizer names '{part.__module__}.{part.__qualname__}'"
    own = {key: value for key, value in keys.items() if key not in (*OWN, "lr")}
    known = inspect.signature(part).parameters
    lr = keys.get("lr", known["lr"].default if "lr" in known else inspect.Parameter.empty)
    if lr is inspect.Parameter.empty:
        raise UsageError(f"{name}; it needs a learning rate; add a line like lr: 0.001 to its file")
    made = PlainOptimizer(
        make=part,
        keys=own,
        lr=lr,
        momentum=number_of(own.get("momentum")),
        weight_decay=number_of(own.get("weight_decay")),
        held=(),
        **{key: keys.get(key, getattr(Optimizer, key)) for key in OWN},
    )
    return try_out(made, name)


def number_of(value: Any) -> float:
    """Return a key's value; 0 if it is no number."""
    return float(value) if isinstance(value, int | float) else 0.0


def try_out(made: PlainOptimizer, name: str) -> PlainOptimizer:
    """Return the optimizer with the state that its class keeps, found by a few steps. Raises
    UsageError.
    """
    draw = torch.Generator().manual_seed(0)
    first = torch.randn(TRIED, generator=draw)
    # Rows of different sizes, so that a norm over all elements changes each of them visibly.
    sizes = torch.logspace(-2, 2, TRIED[0])[:, None]
    grads = [torch.randn(TRIED, generator=draw) * sizes for _ in RATES]
    rates = [made.lr * share for share in RATES]
    try:
        with torch.random.fork_rng(devices=[]):
            right, made = step_as_matrix(made, first, grads, rates)
            found = step_in_slices(made, first, grads, rates)
    except UsageError as error:
        raise UsageError(f"{name}; {error}") from error
    except Exception as error:
        raise UsageError(
            f"{name}; its try-out on one vector failed: {located_error_text(error)}"
        ) from error
    scale = (right - first).abs().max() + torch.finfo(first.dtype).tiny
    if not bool(((found - right).abs() <= TOLERANCE * (scale + right.abs())).all()):
        raise UsageError(
            f"{name}; its step is not element by element: on a slice of the parameters, or on a"
            " matrix as a vector, the step differs; use an element-wise optimizer, for example"
            " optimizer=adamw, or optimizer=muon for matrices, and keep the state in"
            " state[parameter]"
        )
    return made


def step_as_matrix(
    made: PlainOptimizer, first: Tensor, grads: Sequence[Tensor], rates: Sequence[float]
) -> tuple[Tensor, PlainOptimizer]:
    """Return the matrix after the steps of one object of the class, and the optimizer with its
    state.
    """
    parameter = nn.Parameter(first.clone())
    optimizer = made.make([parameter], lr=made.lr, **made.keys)
    for grad, lr in zip(grads, rates, strict=True):
        step_once(optimizer, parameter, grad.clone(), lr)
    held = [
        describe_state(key, value, parameter)
        for key, value in optimizer.state[parameter].items()
        if value is not None
    ]
    return parameter.detach(), replace(made, held=tuple(held))


def step_in_slices(
    made: PlainOptimizer, first: Tensor, grads: Sequence[Tensor], rates: Sequence[float]
) -> Tensor:
    """Return the matrix after the same steps as vectors of two halves that step in turn."""
    halves = list(first.flatten().chunk(2))
    moments = [made.init(len(half)) for half in halves]
    for grad, lr in zip(grads, rates, strict=True):
        for k, part in enumerate(grad.flatten().chunk(2)):
            moments[k], halves[k] = made.step(moments[k], halves[k], part, lr)
    return torch.cat(halves).view_as(first)


def describe_state(name: str, value: Any, parameter: Tensor) -> Held:
    """Return how a value is kept.

    Raises: UsageError for a value that is neither a number nor a tensor of the parameter's shape.
    """
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return Held(name, value.dtype, each=True)
    if not (
        isinstance(value, bool | int | float) or (isinstance(value, Tensor) and not value.dim())
    ):
        what = (
            f"a tensor of shape {list(value.shape)}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
        raise UsageError(
            f"its state {name!r} is {what}; an element-wise step keeps numbers, and tensors of"
            " the parameter's shape"
        )
    return Held(name, value.dtype if isinstance(value, Tensor) else type(value), each=False)
