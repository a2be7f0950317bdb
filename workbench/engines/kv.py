"""The KV cache: allocated once, written in place, handed to transformers' attention as views."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from workbench.engines.layers import TORCH_DTYPES
from workbench.models import family
from workbench.spec import ITEMSIZE, DType, ModelSpec


class PreallocatedLayer(DynamicLayer):
    """A cache layer of a fixed capacity, which keeps keys and values in a dtype of its own and gives them back in that
    in which they come. `update` copies only the new tokens' keys and values.

    at: int64 [1], where one token's are put, for the time that it is set. `update` then gives back all places, of which
    those without a token hold zeros, or what was there before; `grow` says afterwards that the token is there.
    """

    def __init__(self, capacity: int, dtype: DType = "float32"):
        super().__init__()
        self.capacity, self.length, self.kept = capacity, 0, TORCH_DTYPES[dtype]
        self.storage: tuple[torch.Tensor, torch.Tensor] | None = None
        self.at: torch.Tensor | None = None

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.storage is None:
            batch, heads, _, width = key_states.shape
            shape = (batch, heads, self.capacity, width)
            keys, values = (new.new_zeros(shape, dtype=self.kept) for new in (key_states, value_states))
            self.storage = keys, values
            self.is_initialized, self.dtype, self.device = True, key_states.dtype, key_states.device
        if self.at is not None:
            for store, new in zip(self.storage, (key_states, value_states), strict=True):
                store.index_copy_(2, self.at, new.to(store.dtype))
            keys, values = self.storage
            return keys.to(key_states.dtype), values.to(value_states.dtype)
        end = self.length + key_states.shape[-2]
        for store, new in zip(self.storage, (key_states, value_states), strict=True):
            store[:, :, self.length : end] = new
        self.length = end
        self.keys, self.values = (store[:, :, :end] for store in self.storage)
        return self.keys.to(key_states.dtype), self.values.to(value_states.dtype)

    def get_seq_length(self) -> int:
        return self.length

    def grow(self) -> None:
        """One token more is there, whose keys and values were put `at` its place."""
        self.rewind(self.length + 1)

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        before, self.length = self.length, length
        if self.storage is not None:
            for store in self.storage if length < before else ():
                store[:, :, length:before] = 0  # whoever attends to all places meets what is not finite in none
            self.keys, self.values = (store[:, :, :length] for store in self.storage)

    def resize(self, capacity: int, dtype: DType = "float32") -> None:
        """Room for `capacity` tokens, no fewer than there are, kept in `dtype`; what is there stays."""
        if capacity < self.length:
            raise ValueError(f"capacity={capacity} is less than the {self.length} tokens that are there")
        kept = TORCH_DTYPES[dtype]
        if self.storage is not None and (capacity, kept) != (self.capacity, self.kept):
            keys, values = (_moved(old, self.length, capacity, kept) for old in self.storage)
            self.storage = keys, values
            if self.storage is not None and self.length:
                self.keys, self.values = (store[:, :, : self.length] for store in self.storage)
        self.capacity, self.kept = capacity, kept

    def reset(self) -> None:
        self.length = 0
        self.keys = self.values = None


def _moved(old: torch.Tensor, length: int, capacity: int, dtype: torch.dtype) -> torch.Tensor:
    new = old.new_zeros((*old.shape[:2], capacity, old.shape[3]), dtype=dtype)
    new[:, :, :length] = old[:, :, :length]
    return new


def new_cache(spec: ModelSpec, capacity: int, dtype: DType = "float32") -> Cache:
    """An empty cache of `capacity` tokens for every layer, kept in `dtype`."""
    return Cache(layers=[PreallocatedLayer(capacity, dtype) for _ in range(spec.num_layers)])


def cache_argument(model: torch.nn.Module) -> str:
    """The name under which this version of transformers takes the cache."""
    return (
        "cache" if "cache" in inspect.signature(inspect.unwrap(type(model).forward)).parameters else "past_key_values"
    )


def cache_bytes(spec: ModelSpec, capacity: int, dtype: DType = "float32") -> int:
    """Bytes of keys and values of `capacity` tokens; of 16-bit ones, also of a layer's widened for its attention."""
    heads, width = family(spec.model_type).kv_shape(spec)
    values, each = 2 * capacity * heads * width, ITEMSIZE[dtype]
    return values * each * spec.num_layers + (0 if each == 4 else 4 * values)
