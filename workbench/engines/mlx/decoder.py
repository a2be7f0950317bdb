"""A decoder in MLX without its FFNs: the caller runs those between `attend` and `join`.

h = decoder.embed(ids, offset)
for layer in range(spec.num_layers):
    h, x = decoder.attend(layer, h, caches[layer], offset)
    h = decoder.join(layer, h, ffn(layer, x))
logits = decoder.head(h)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.engines.mlx.families import ARCHITECTURES, Architecture, Linear, Weights
from workbench.engines.mlx.kv import LayerCache
from workbench.engines.mlx.positions import Alibi, Rotary, Step
from workbench.models import family
from workbench.spec import DType, ModelSpec

if TYPE_CHECKING:
    import mlx.core as mx


def build(spec: ModelSpec, weights: Weights, linear: Linear, compiled: bool = True) -> Decoder:
    """The decoder of a spec.

    weights: the store's resident tensors by name, float32, float16 or bfloat16; looked up anew in each pass, so the
    mapping may be filled later and its arrays may be replaced. linear(x, weight, bias): every matrix product of the
    decoder; pure, since it may be compiled. compiled: whether passes over one token are compiled, once for all layers.
    CheckpointError when transformers refuses the config.
    """
    skeleton = family(spec.model_type).skeleton(spec)
    parts = ARCHITECTURES[spec.model_type](skeleton.config, linear)
    rotary = getattr(skeleton.base_model, "rotary_emb", None)
    return Decoder(
        spec, weights, parts, None if rotary is None or parts.alibi else Rotary(rotary, parts.width), compiled
    )


@dataclass(frozen=True)
class _Passes:
    """The parts of a layer on either side of the cache and of the FFN: no shape in them depends on the text's length,
    so that compiled for one token they are compiled once, for all layers. None of them holds a weight."""

    project: Callable[[Weights, mx.array, mx.array, mx.array | None], tuple[mx.array, mx.array, mx.array, mx.array]]
    finish: Callable[[Weights, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
    join: Callable[[Weights, mx.array, mx.array], mx.array]

    @classmethod
    def of(cls, parts: Architecture, rotary: Rotary | None) -> _Passes:
        def project(
            layer: Weights, h: mx.array, offset: mx.array, wavelengths: mx.array | None
        ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
            x, *projected = parts.project(layer, h)
            q, k, v = (y.transpose(1, 0, 2)[None] for y in projected)
            if rotary is not None and wavelengths is not None:
                q, k = (rotary.rotate(y, offset, wavelengths) for y in (q, k))
            return x, q, k, v

        def finish(layer: Weights, h: mx.array, x: mx.array, out: mx.array) -> tuple[mx.array, mx.array]:
            return parts.finish(layer, h, x, out[0].transpose(1, 0, 2).reshape(len(h), -1))

        return cls(project, finish, parts.join)

    def compiled(self) -> _Passes:
        import mlx.core as mx

        return _Passes(mx.compile(self.project), mx.compile(self.finish), mx.compile(self.join))


class Decoder:
    """See `build`. Every method is lazy: it adds to MLX's graph and evaluates nothing.

    Activations are float32 [tokens, d_model]. One pass may have any number of tokens.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, parts: Architecture, rotary: Rotary | None, compiled: bool
    ) -> None:
        self.spec, self.weights, self._parts, self._rotary = spec, weights, parts, rotary
        self._alibi = Alibi(parts.heads, parts.width) if parts.alibi else None
        self._names = _layer_names(spec)
        self._many = _Passes.of(parts, rotary)
        self._one = self._many.compiled() if compiled else self._many
        self._step: tuple[int, int, Step] | None = None

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Heads of the KV cache and the width of each. Heads that share a key are not repeated."""
        return self._parts.kv_heads, self._parts.width

    def new_cache(self, capacity: int, dtype: DType = "float32") -> list[LayerCache]:
        """An empty cache of `capacity` tokens for every layer, kept in `dtype`."""
        heads, width = self.kv_shape
        return [LayerCache(heads, capacity, width, dtype) for _ in range(self.spec.num_layers)]

    def embed(self, ids: mx.array, offset: int) -> mx.array:
        """The first layer's input [tokens, d_model] of `ids` [tokens], which follow `offset` others."""
        return self._parts.embed(self.weights, ids, offset)

    def attend(self, layer: int, h: mx.array, cache: LayerCache, offset: int) -> tuple[mx.array, mx.array]:
        """A layer up to its FFN: (what `join` is to be given, the FFN's input), both [tokens, d_model].

        `cache` has the `offset` tokens before `h`, and gets those of `h`; ValueError when it has others, or no room.
        """
        import mlx.core as mx

        if cache.length != offset:
            raise ValueError(f"layer {layer}: the cache has {cache.length} tokens, {offset} come before these")
        step = self._position(offset, len(h))
        passes, weights = self._one if len(h) == 1 else self._many, self._layer(layer)
        x, q, k, v = passes.project(weights, h, step.offset, step.wavelengths)
        keys, values = cache.update(k, v)
        out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=self._parts.scale, mask=step.mask)
        return passes.finish(weights, h, x, out)

    def join(self, layer: int, h_after: mx.array, ffn_out: mx.array) -> mx.array:
        """The layer's output from `attend`'s first result and the FFN's output, its biases included."""
        passes = self._one if len(h_after) == 1 else self._many
        return passes.join(self._layer(layer), h_after, ffn_out)

    def head(self, h: mx.array) -> mx.array:
        """Logits float32 [tokens, vocab] of the last layer's output."""
        return self._parts.head(self.weights, h)

    def _layer(self, layer: int) -> dict[str, mx.array]:
        return {short: self.weights[name] for short, name in self._names[layer]}

    def _position(self, offset: int, tokens: int) -> Step:
        """The same for all layers of a pass, so it is made once."""
        import mlx.core as mx

        if self._step is None or self._step[:2] != (offset, tokens):
            mask: Any = "causal" if tokens > 1 else None
            if self._alibi is not None:
                mask = self._alibi.mask(offset, tokens)
            wavelengths = None if self._rotary is None else self._rotary.at(offset + tokens)
            self._step = (offset, tokens, Step(mx.array(offset, mx.int32), wavelengths, mask))
        return self._step[2]


def _layer_names(spec: ModelSpec) -> list[list[tuple[str, str]]]:
    """By layer, (short name, name) of its tensors apart from its FFN's."""
    module, layers = family(spec.model_type), range(spec.num_layers)
    ffns = (module.ffn_names(spec, layer) for layer in layers)
    ffn = {name for names in ffns for name in (*names.matrices, names.up_bias, names.down_bias, names.gate_bias)}
    found: list[list[tuple[str, str]]] = [[] for _ in layers]
    for name in module.tensor_shapes(spec):
        layer = module.layer_of(name)
        if layer is not None and name not in ffn:
            found[layer].append((name.split(f".{layer}.", 1)[1], name))
    return found
