"""Provide a module for a learner: its parameters are views of the given vector, or copies of a
short one.

Copying a short vector takes less time than making views.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.batchnorm import _BatchNorm

from ashl.device import to_device
from ashl.learn.graphs import Graphs

SHORT = 2**16  # elements: up to this length a copy takes less time than views


class Replica(threading.local):
    """A module per computing thread, made at the thread's first use; its buffers are never
    exchanged.
    """

    def __init__(
        self, build: Callable[[], nn.Module], device: str, graphs: bool, copies: bool = False
    ) -> None:
        """Args: graphs is True if steps will be captured, for which parameters stay in one
        place; copies is True if the model writes into its parameters, so that it gets a copy of
        each vector.
        """
        self.device, self.graphs = device, Graphs(device)
        self.module = to_device(build(), device)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        here = [*self.module.modules()]
        # A submodule that was built in evaluation mode stays in it. A model that is in evaluation
        # mode as a whole was only loaded in it.
        self.held = (
            [module for module in here if not module.training] if self.module.training else []
        )
        self.train()
        self.norms = [
            module for module in here if isinstance(module, _BatchNorm) and is_estimated(module)
        ]
        norms = {id(norm) for norm in self.norms}
        self.apart = frozenset(
            path for path, module in self.module.named_modules() if id(module) in norms
        )
        self.num_params = sum(p.numel() for p in self.parameters)
        # Ids of parameters that are used where no function of torch shows it.
        self.hidden: set[int] = set()
        # The vector of which the parameters are views, if vectors are copied in.
        self.resident: Tensor | None = None
        # Other models are refused.
        fits = bool(self.parameters) and all(p.dtype == torch.float32 for p in self.parameters)
        self.copies = copies
        if fits and (self.num_params <= SHORT or graphs or copies):
            resident = _flatten_dense_tensors([p.detach() for p in self.parameters]).clone()
            self.set_parameters(resident)
            self.resident = resident

    def train(self) -> None:
        """Put the module into training mode, except the submodules that are held in evaluation
        mode.
        """
        self.module.train()
        for module in self.held:
            module.training = False
        self.trains = True

    def eval(self) -> None:
        """Put the module into evaluation mode."""
        self.module.eval()
        self.trains = False

    def set_parameters(self, params: Tensor) -> None:
        """Make the module compute at these parameters, float32 [d].

        Raises: ValueError for a vector of another length.
        """
        if params.shape != (self.num_params,):
            raise ValueError(
                f"expected a vector of {self.num_params} parameters, got shape"
                f" {tuple(params.shape)}"
            )
        params = to_device(params.detach(), self.device)
        if self.resident is not None:
            self.resident.copy_(params)
            if not self.copies:
                return
            params = self.resident  # the model may have given a parameter another tensor
        views = _unflatten_dense_tensors(params, self.parameters)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view

    def copy_parameters(self) -> Tensor:
        """Return the parameters after the last forward pass, a new vector."""
        return _flatten_dense_tensors([p.detach() for p in self.parameters]).clone()


def is_estimated(module: _BatchNorm) -> bool:
    """Return True if an evaluation estimates this norm's statistics, which it gathers in training.

    A norm that the model holds in evaluation mode, or that has momentum 0, keeps its statistics. A
    subclass with its own forward may read them in training.
    """
    return (
        type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
        and module.training
        and module.running_mean is not None
        and module.momentum != 0
    )
