"""The KV cache in MLX: allocated once, written in place, handed to attention as views."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.spec import ITEMSIZE, DType

if TYPE_CHECKING:
    import mlx.core as mx


class LayerCache:
    """Keys and values of one layer, [1, heads, capacity, width] in `dtype`; `length` tokens of them are filled.

    Memory is taken with the first token. `update` copies only the new tokens' keys and values, as long as nobody
    else holds `keys` or `values`, or a view that `update` returned: MLX writes in place only what has one owner.
    """

    def __init__(self, heads: int, capacity: int, width: int, dtype: DType = "float32") -> None:
        self.heads, self.capacity, self.width, self.dtype = heads, capacity, width, dtype
        self.length = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take at this capacity."""
        return 2 * ITEMSIZE[self.dtype] * self.heads * self.capacity * self.width

    def update(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values, float32 [1, heads, tokens, width]; returns all, float32
        [1, heads, length, width]: views, unless they are kept in another dtype.

        ValueError when there is no room. Lazy, as all of MLX.
        """
        end = self.length + keys.shape[2]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit a cache of {self.capacity}; resize it first")
        if self.keys is None or self.values is None:
            self.keys, self.values = self._empty(), self._empty()
        self.keys[:, :, self.length : end] = keys.astype(self.keys.dtype)
        self.values[:, :, self.length : end] = values.astype(self.values.dtype)
        self.length = end
        return self.keys[:, :, :end].astype(keys.dtype), self.values[:, :, :end].astype(values.dtype)

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens. ValueError when there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length={length} is not in 0..{self.length}")
        self.length = length

    def resize(self, capacity: int, dtype: DType = "float32") -> None:
        """Room for `capacity` tokens, kept in `dtype`; ValueError when there are more. What is there stays.

        The new memory is filled, and the old given up, when the cache is next evaluated.
        """
        if capacity < self.length:
            raise ValueError(f"capacity={capacity} is less than the {self.length} tokens that are there")
        if (capacity, dtype) == (self.capacity, self.dtype):
            return
        self.capacity, self.dtype = capacity, dtype
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self._moved(self.keys), self._moved(self.values)

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self.length = 0

    def _empty(self) -> mx.array:
        import mlx.core as mx

        return mx.zeros((1, self.heads, self.capacity, self.width), getattr(mx, self.dtype))

    def _moved(self, old: mx.array) -> mx.array:
        new = self._empty()
        new[:, :, : self.length] = old[:, :, : self.length].astype(new.dtype)
        return new
