"""A module evaluated with other weights than its own, which it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from codistill.learners.batch_norm import single_values_allowed


def gradient_at(
    module: nn.Module,
    weights: Mapping[str, np.ndarray],
    x: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[str, np.ndarray]:
    """The gradient of loss(Φ(x; w), Φ(x; w_k)) by the given weights w, where w_k are the module's own.

    Batch norm uses the statistics of the batch, as in a gradient step, and dropout leaves nothing out: so equal weights
    give equal outputs. Names that `weights` leaves out are the module's own, of which nothing changes. There is an
    array for each floating-point weight; 0 for a buffer.
    """
    module.eval()
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.train()
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    given = {name: _tensor(array, x.device).requires_grad_(name in trained) for name, array in weights.items()}
    with torch.no_grad():
        own = _outputs(module, {}, x)
    value = loss(_outputs(module, given, x), own)
    wanted = {name: tensor for name, tensor in given.items() if name in trained}
    found = torch.autograd.grad(value, list(wanted.values()), allow_unused=True) if wanted else ()
    gradients = dict(zip(wanted, found, strict=True))
    return {
        name: np.zeros(array.shape, array.dtype) if gradients.get(name) is None else gradients[name].cpu().numpy()
        for name, array in weights.items()
        if array.dtype.kind == "f"
    }


def outputs_at(module: nn.Module, weights: Mapping[str, np.ndarray], x: torch.Tensor) -> torch.Tensor:
    """Φ(x; w) with the given weights, in evaluation mode and without a graph; names left out are the module's own."""
    module.eval()
    with torch.no_grad():
        return _outputs(module, {name: _tensor(array, x.device) for name, array in weights.items()}, x)


def _outputs(module: nn.Module, given: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Outputs with the given weights, on copies of the module's buffers: batch norm writes to them."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in given}
    with single_values_allowed(module, x):
        outputs: torch.Tensor = functional_call(module, {**buffers, **given}, (x,))
    return outputs


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy; kernels of convolutions in the memory format in which they are fastest."""
    tensor = torch.tensor(array, device=device)
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
