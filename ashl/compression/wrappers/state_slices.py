"""Split a sender's state where its vector is split into messages, and join the parts again.

Rule: wrappers keep vectors element by element (residual, velocity, running mean). Numbers in a
state are equal for all parts. So the joined parts equal the state that one message of the whole
vector would leave.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ashl.compression.contract import State


def slice_state(state: State, start: int, stop: int) -> State:
    """Return the state of the elements [start, stop), as views."""
    if isinstance(state, Tensor):
        return state[start:stop]
    if isinstance(state, tuple):
        return type(state)(*(slice_state(field, start, stop) for field in state))
    return state


def join_states(states: Sequence[State]) -> State:
    """Return the state of the whole vector from the states of its parts, in order."""
    first = states[0]
    if isinstance(first, Tensor):
        return torch.cat(list(states))
    if isinstance(first, tuple):
        return type(first)(*map(join_states, zip(*states, strict=True)))
    return first
