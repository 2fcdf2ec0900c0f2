"""A module evaluated with other weights than its own, which it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from codistill.learners.batch_norm import single_values_allowed
from codistill.learners.module_memory import first_names


def gradient_at(
    module: nn.Module,
    weights: Mapping[str, np.ndarray],
    x: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[str, np.ndarray]:
    """The gradient of loss(Φ(x; w), Φ(x; w_k)) by the given weights w, where w_k are the module's own.

    Batch norm uses the statistics of the batch, as in a gradient step, and dropout leaves nothing out: so equal weights
    give equal outputs. Names that `weights` leaves out are the module's own, of which nothing changes. There is an
    array for each floating-point weight; 0 for a buffer. Of a weight that layers share it is the sum over these.
    """
    first = first_names(module)
    module.eval()
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.train()
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    given = {name: tensor.requires_grad_(name in trained) for name, tensor in _given(module, weights, x).items()}
    with torch.no_grad():
        own = _outputs(module, {}, x)
    value = loss(_outputs(module, given, x), own)
    wanted = {name: tensor for name, tensor in given.items() if name in trained}
    found = torch.autograd.grad(value, list(wanted.values()), allow_unused=True) if wanted else ()
    gradients = dict(zip(wanted, found, strict=True))
    return {
        name: _array(gradients.get(first.get(name, name)), array)
        for name, array in weights.items()
        if array.dtype.kind == "f"
    }


def outputs_at(module: nn.Module, weights: Mapping[str, np.ndarray], x: torch.Tensor) -> torch.Tensor:
    """Φ(x; w) with the given weights, in evaluation mode and without a graph; names left out are the module's own."""
    module.eval()
    with torch.no_grad():
        return _outputs(module, _given(module, weights, x), x)


def _outputs(module: nn.Module, given: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Outputs with the given weights, on copies of the module's buffers: batch norm writes to them."""
    tensors = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in given} | dict(given)
    places = {place: tensors[name] for place, name in _places(module).items() if name in tensors}
    with single_values_allowed(module, x):
        # What layers share is put into each of them here: torch would not take it out of a layer with two names again.
        outputs: torch.Tensor = functional_call(module, places, (x,), tie_weights=False)
    return outputs


def _places(module: nn.Module) -> dict[str, str]:
    """Where parameters and buffers are, each layer under its first name, and the first name of what is there."""
    names: dict[int, str] = {}
    places = {}
    for prefix, part in module.named_modules():
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                place = f"{prefix}.{key}" if prefix else key
                places[place] = names.setdefault(id(tensor), place)
    return places


def _array(gradient: torch.Tensor | None, like: np.ndarray) -> np.ndarray:
    return np.zeros(like.shape, like.dtype) if gradient is None else gradient.cpu().numpy()


def _given(module: nn.Module, weights: Mapping[str, np.ndarray], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights as tensors, one that layers share under its first name alone."""
    first = first_names(module)
    return {first.get(name, name): _tensor(array, x.device) for name, array in weights.items()}


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy; kernels of convolutions in the memory format in which they are fastest."""
    tensor = torch.tensor(array, device=device)
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
