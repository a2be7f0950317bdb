"""What the decoders of the five families differ in, in MLX. Weights go by the names of transformers' state dict.

Everything is lazy. Activations are float32; weights may be 16-bit, and every matrix product goes through `linear`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

Linear = Callable[["mx.array", "mx.array", "mx.array | None"], "mx.array"]
"""x float32 [..., in], weight [out, in] and bias [out], or None, in the store's dtype, to float32 [..., out]."""
Weights = Mapping[str, "mx.array"]


class Architecture(ABC):
    """A family's parts. `config` is transformers' config object, whose defaults are filled in.

    `heads` and `kv_heads` of `width` values each; `scale` is what scores are multiplied by. Layers are given their
    own weights by short names: what follows 'layers.N.'.
    """

    embedding: str
    head_weight = "lm_head.weight"

    def __init__(self, config: Any, linear: Linear) -> None:
        self.config, self.linear = config, linear
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = self.heads
        self.width: int = config.hidden_size // self.heads
        self.alibi = False

    @property
    def scale(self) -> float:
        """1 / sqrt(width)."""
        return self.width**-0.5

    def embed(self, weights: Weights, ids: mx.array, offset: int) -> mx.array:
        """The hidden state float32 [tokens, d_model] of `ids` [tokens], which follow `offset` others."""
        import mlx.core as mx

        return weights[self.embedding][ids].astype(mx.float32)

    @abstractmethod
    def project(self, layer: Weights, h: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """(x, queries, keys, values) of h [tokens, d_model]: x is what attention is given, [tokens, d_model];
        queries [tokens, heads, width], keys and values [tokens, kv_heads, width], not yet rotated."""

    @abstractmethod
    def finish(self, layer: Weights, h: mx.array, x: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
        """(residual, the FFN's input) from `attended` [tokens, heads * width]; both [tokens, d_model]."""

    def join(self, layer: Weights, residual: mx.array, ffn_out: mx.array) -> mx.array:
        """The layer's output."""
        return residual + ffn_out

    @abstractmethod
    def head(self, weights: Weights, h: mx.array) -> mx.array:
        """Logits [tokens, vocab]."""

    def logits(self, weights: Weights, h: mx.array) -> mx.array:
        """`h`, after the last norm, times the head, or the embedding where they are tied."""
        tied = self.config.tie_word_embeddings
        return self.linear(h, weights[self.embedding if tied else self.head_weight], weights.get("lm_head.bias"))

    def apply(self, name: str, layer: Weights, x: mx.array) -> mx.array:
        """The linear layer of that name."""
        return self.linear(x, layer[name + ".weight"], layer.get(name + ".bias"))

    def fused(self, name: str, layer: Weights, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values of one matrix, whose rows are by key head: its queries, its key, its value."""
        out = self.apply(name, layer, x).reshape(len(x), self.kv_heads, -1, self.width)
        return out[:, :, :-2].reshape(len(x), self.heads, self.width), out[:, :, -2], out[:, :, -1]

    def split(self, prefix: str, layer: Weights, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values of q_proj, k_proj and v_proj."""
        q, k, v = (
            self.apply(f"{prefix}{name}_proj", layer, x).reshape(len(x), heads, self.width)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        return q, k, v


def layer_norm(weights: Weights, name: str, x: mx.array, eps: float) -> mx.array:
    """Layer norm over the last axis; without an affine part where there is none."""
    import mlx.core as mx

    return mx.fast.layer_norm(x, weights.get(name + ".weight"), weights.get(name + ".bias"), eps)


class Opt(Architecture):
    """OPT: learned positions; norms before or after (350m), and an embedding narrower than the rest (350m)."""

    embedding = "model.decoder.embed_tokens.weight"
    _DECODER = "model.decoder."
    _EPS = 1e-5
    _FIRST = 2
    """Rows of the position table before position 0."""

    def embed(self, weights: Weights, ids: mx.array, offset: int) -> mx.array:
        import mlx.core as mx

        h = super().embed(weights, ids, offset)
        if self.config.word_embed_proj_dim != self.config.hidden_size:
            h = self.apply(self._DECODER + "project_in", weights, h)
        start = offset + self._FIRST
        positions = weights[self._DECODER + "embed_positions.weight"][start : start + len(ids)]
        return h + positions.astype(mx.float32)

    def project(self, layer: Weights, h: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        x = self._norm(layer, "self_attn_layer_norm", h) if self.config.do_layer_norm_before else h
        return x, *self.split("self_attn.", layer, x)

    def finish(self, layer: Weights, h: mx.array, x: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
        h = h + self.apply("self_attn.out_proj", layer, attended)
        if self.config.do_layer_norm_before:
            return h, self._norm(layer, "final_layer_norm", h)
        h = self._norm(layer, "self_attn_layer_norm", h)
        return h, h

    def join(self, layer: Weights, residual: mx.array, ffn_out: mx.array) -> mx.array:
        h = residual + ffn_out
        return h if self.config.do_layer_norm_before else self._norm(layer, "final_layer_norm", h)

    def head(self, weights: Weights, h: mx.array) -> mx.array:
        if self.config.do_layer_norm_before and not self.config._remove_final_layer_norm:
            h = self._norm(weights, self._DECODER + "final_layer_norm", h)
        if self.config.word_embed_proj_dim != self.config.hidden_size:
            h = self.apply(self._DECODER + "project_out", weights, h)
        return self.logits(weights, h)

    def _norm(self, weights: Weights, name: str, h: mx.array) -> mx.array:
        return layer_norm(weights, name, h, self._EPS)


class Llama(Architecture):
    """Llama: RMS norms, rotary positions, grouped queries."""

    embedding = "model.embed_tokens.weight"

    def __init__(self, config: Any, linear: Linear) -> None:
        super().__init__(config, linear)
        self.kv_heads, self.width = config.num_key_value_heads, config.head_dim

    def project(self, layer: Weights, h: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        x = self._norm(layer["input_layernorm.weight"], h)
        return x, *self.split("self_attn.", layer, x)

    def finish(self, layer: Weights, h: mx.array, x: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
        h = h + self.apply("self_attn.o_proj", layer, attended)
        return h, self._norm(layer["post_attention_layernorm.weight"], h)

    def head(self, weights: Weights, h: mx.array) -> mx.array:
        return self.logits(weights, self._norm(weights["model.norm.weight"], h))

    def _norm(self, weight: mx.array, h: mx.array) -> mx.array:
        import mlx.core as mx

        return mx.fast.rms_norm(h, weight, self.config.rms_norm_eps)


class Falcon(Architecture):
    """Falcon: attention and FFN in parallel, from one norm or two, or in sequence; rotary positions or alibi."""

    embedding = "transformer.word_embeddings.weight"

    def __init__(self, config: Any, linear: Linear) -> None:
        super().__init__(config, linear)
        self.alibi = config.alibi
        self._two_norms = config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1
        if config.new_decoder_architecture:
            self.kv_heads = config.num_kv_heads
        elif config.multi_query:
            self.kv_heads = 1

    def project(self, layer: Weights, h: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        x = self._norm(layer, "ln_attn" if self._two_norms else "input_layernorm", h)
        return x, *self.fused("self_attention.query_key_value", layer, x)

    def finish(self, layer: Weights, h: mx.array, x: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
        after = h + self.apply("self_attention.dense", layer, attended)
        if self._two_norms:
            return after, self._norm(layer, "ln_mlp", h)
        return after, x if self.config.parallel_attn else self._norm(layer, "post_attention_layernorm", after)

    def head(self, weights: Weights, h: mx.array) -> mx.array:
        return self.logits(weights, self._norm(weights, "transformer.ln_f", h))

    def _norm(self, weights: Weights, name: str, h: mx.array) -> mx.array:
        return layer_norm(weights, name, h, self.config.layer_norm_epsilon)


class Persimmon(Architecture):
    """Persimmon: partly rotated heads, with norms on queries and keys."""

    embedding = "model.embed_tokens.weight"

    def project(self, layer: Weights, h: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        x = self._norm(layer, "input_layernorm", h)
        q, k, v = self.fused("self_attn.query_key_value", layer, x)
        if self.config.qk_layernorm:
            q, k = (self._norm(layer, f"self_attn.{n}_layernorm", y) for n, y in (("q", q), ("k", k)))
        return x, q, k, v

    def finish(self, layer: Weights, h: mx.array, x: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
        h = h + self.apply("self_attn.dense", layer, attended)
        return h, self._norm(layer, "post_attention_layernorm", h)

    def head(self, weights: Weights, h: mx.array) -> mx.array:
        return self.logits(weights, self._norm(weights, "model.final_layernorm", h))

    def _norm(self, weights: Weights, name: str, h: mx.array) -> mx.array:
        return layer_norm(weights, name, h, self.config.layer_norm_eps)


class Phi(Architecture):
    """Phi: attention and FFN in parallel, from one norm; partly rotated heads, grouped queries."""

    embedding = "model.embed_tokens.weight"

    def __init__(self, config: Any, linear: Linear) -> None:
        super().__init__(config, linear)
        self.kv_heads = config.num_key_value_heads

    def project(self, layer: Weights, h: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        x = self._norm(layer, "input_layernorm", h)
        q, k, v = self.split("self_attn.", layer, x)
        if self.config.qk_layernorm:
            q, k = (self._norm(layer, f"self_attn.{n}_layernorm", y) for n, y in (("q", q), ("k", k)))
        return x, q, k, v

    def finish(self, layer: Weights, h: mx.array, x: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
        return h + self.apply("self_attn.dense", layer, attended), x

    def head(self, weights: Weights, h: mx.array) -> mx.array:
        return self.logits(weights, self._norm(weights, "model.final_layernorm", h))

    def _norm(self, weights: Weights, name: str, h: mx.array) -> mx.array:
        return layer_norm(weights, name, h, self.config.layer_norm_eps)


ARCHITECTURES: dict[str, type[Architecture]] = {
    "opt": Opt,
    "llama": Llama,
    "falcon": Falcon,
    "persimmon": Persimmon,
    "phi": Phi,
}
"""By `ModelSpec.model_type`."""
