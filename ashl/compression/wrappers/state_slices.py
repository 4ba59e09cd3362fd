"""What a sender keeps of a vector, cut where the vector is cut into messages, and put together
again.

Rule: whatever wrappers keep of a vector, they keep element by element (residual, velocity, running
mean), and numbers beside that are alike for all parts. So the parts together are what one message
of it all would have left.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ashl.compression.contract import State


def slice_state(state: State, start: int, stop: int) -> State:
    """Of the elements [start, stop), as views."""
    if isinstance(state, Tensor):
        return state[start:stop]
    return (
        type(state)(*(slice_state(field, start, stop) for field in state))
        if isinstance(state, tuple)
        else state
    )


def join_states(states: Sequence[State]) -> State:
    """Of the whole vector, of its parts in order."""
    first = states[0]
    if isinstance(first, Tensor):
        return torch.cat(list(states))
    return (
        type(first)(*map(join_states, zip(*states, strict=True)))
        if isinstance(first, tuple)
        else first
    )
