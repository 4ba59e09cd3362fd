"""What a module keeps beside the parameters that are learned: frozen parameters and buffers."""

from torch import Tensor, nn


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by its name, those that no `state_dict` has among them."""
    return dict(module.named_parameters()) | dict(module.named_buffers())
