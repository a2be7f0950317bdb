"""transformers' modules over weights as the store keeps them: 16-bit storage, float32 arithmetic.

A resident weight is never widened as a whole, so that the DRAM it takes is what flash holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from workbench.kernels.linear import linear

FEW_TOKENS = 16
"""Up to here the native kernel is used, which reads the weights once and gives each token, to the bit, what it gets
alone."""
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def as_numpy(weight: torch.Tensor) -> np.ndarray[Any, Any]:
    """A stored weight for the kernels: float32, or 16-bit as uint16. No copy."""
    weight = weight.detach()
    return weight.numpy() if weight.dtype == torch.float32 else weight.view(torch.uint16).numpy()


def as_tensor(stored: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    """A stored array as numpy has it (bfloat16 as uint16) as a tensor of its own dtype, in memory of its own."""
    array = np.array(stored)
    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array).view(TORCH_DTYPES[dtype])


class StoredLinear(nn.Module):
    """A linear layer, weight [out, in] in the store's dtype; takes and returns float32."""

    def __init__(self, dtype: str, threads: int):
        super().__init__()
        self.dtype_name, self.threads = dtype, threads
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None
        self._bound: tuple[Any, Any] = (None, None)  # the parameters that `_arrays` are of
        self._arrays: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]

    @classmethod
    def like(cls, module: nn.Linear, dtype: str, threads: int) -> StoredLinear:
        made = cls(dtype, threads)
        made.register_parameter("weight", cast(nn.Parameter, module.weight))
        made.register_parameter("bias", module.bias)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > FEW_TOKENS * x.shape[-1]:
            return F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())
        weight, bias = self._views()
        if bias is not None and bias.dtype != np.float32:
            bias = cast(nn.Parameter, self.bias).float().numpy()
        rows = x.numpy().reshape(-1, x.shape[-1])
        out = linear(np.ascontiguousarray(rows), weight, bias, self.dtype_name, self.threads)
        return torch.from_numpy(out.reshape(*x.shape[:-1], -1))

    def _views(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """The parameters as numpy sees them, made once: after megabytes of weights nothing of Python is in a cache,
        and each call that is not made saves microseconds. A buffer that is read again is seen through the view."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if self._bound[0] is not weight or self._bound[1] is not bias:
            self._arrays = (as_numpy(cast(nn.Parameter, weight)), None if bias is None else as_numpy(bias))
            self._bound = (weight, bias)
        return self._arrays


class StoredLayerNorm(nn.Module):
    """Layer norm whose affine part is in the store's dtype."""

    def __init__(self, shape: tuple[int, ...], eps: float):
        super().__init__()
        self.shape, self.eps = shape, eps
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None

    @classmethod
    def like(cls, module: nn.LayerNorm) -> StoredLayerNorm:
        made = cls(module.normalized_shape, module.eps)
        made.register_parameter("weight", module.weight)
        made.register_parameter("bias", module.bias)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x, self.shape, weight, bias, self.eps)


def use_stored_weights(model: nn.Module, linear: Callable[[nn.Linear], nn.Module]) -> None:
    """Swap, in place, every linear for what `linear` makes of it, and every layer norm for its stored twin; embeddings
    return float32."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, linear(child))
            elif type(child) is nn.LayerNorm:
                setattr(parent, name, StoredLayerNorm.like(child))
            elif isinstance(child, nn.Embedding):
                child.register_forward_hook(lambda module, inputs, out: out.float())
