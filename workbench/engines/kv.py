"""The KV cache: allocated once, written in place, handed to transformers' attention as views."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from workbench.models import family
from workbench.spec import ModelSpec


class PreallocatedLayer(DynamicLayer):
    """A cache layer of a fixed capacity. `update` copies only the new tokens' keys and values."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.storage: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.storage is None:
            batch, heads, _, width = key_states.shape
            shape = (batch, heads, self.capacity, width)
            self.storage = (key_states.new_empty(shape), value_states.new_empty(shape))
            self.is_initialized, self.dtype, self.device = True, key_states.dtype, key_states.device
        end = self.length + key_states.shape[-2]
        for store, new in zip(self.storage, (key_states, value_states), strict=True):
            store[:, :, self.length : end] = new
        self.length = end
        self.keys, self.values = (store[:, :, :end] for store in self.storage)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.length = length
        if self.storage is not None:
            self.keys, self.values = (store[:, :, :length] for store in self.storage)

    def resize(self, capacity: int) -> None:
        """Room for `capacity` tokens, no fewer than there are; what is there stays."""
        if capacity < self.length:
            raise ValueError(f"capacity={capacity} is less than the {self.length} tokens that are there")
        if self.storage is not None and capacity != self.capacity:
            self.storage = tuple(_moved(old, self.length, capacity) for old in self.storage)  # type: ignore[assignment]
            if self.storage is not None and self.length:
                self.keys, self.values = (store[:, :, : self.length] for store in self.storage)
        self.capacity = capacity

    def reset(self) -> None:
        self.length = 0
        self.keys = self.values = None


def _moved(old: torch.Tensor, length: int, capacity: int) -> torch.Tensor:
    new = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
    new[:, :, :length] = old[:, :, :length]
    return new


def new_cache(spec: ModelSpec, capacity: int) -> Cache:
    """An empty cache of `capacity` tokens for every layer."""
    return Cache(layers=[PreallocatedLayer(capacity) for _ in range(spec.num_layers)])


def cache_argument(model: torch.nn.Module) -> str:
    """The name under which this version of transformers takes the cache."""
    return (
        "cache" if "cache" in inspect.signature(inspect.unwrap(type(model).forward)).parameters else "past_key_values"
    )


def cache_bytes(spec: ModelSpec, capacity: int) -> int:
    """Bytes of keys and values of `capacity` tokens in float32."""
    heads, width = family(spec.model_type).kv_shape(spec)
    return 2 * 4 * spec.num_layers * capacity * heads * width
