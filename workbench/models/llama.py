"""Llama (Touvron et al. 2023) and its ReLU and FATReLU derivatives: gated FFN, RMS norms, rotary positions.

Names and shapes are those of transformers' LlamaForCausalLM. ProSparse (Song et al. 2024) publishes its checkpoints as
'sparsellama' with code of their own; they differ from Llama in the activation only, and run here without that code.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from workbench.models import build, fields, shapes
from workbench.models.activation import activation
from workbench.models.family import FfnNames
from workbench.models.rotary import check_rotary
from workbench.spec import ModelSpec

MODEL_TYPE = "llama"
ALIASES = ("sparsellama",)
ACTIVATION_FIELD = "hidden_act"
_MODEL, _LAYERS = "model.", "model.layers."
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
_SWITCHES = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
"""Optional settings and what their absence means in a Llama config."""
_POSITIONS = 2048
"""max_position_embeddings where the config has none."""


def spec(config: dict[str, Any], force: bool = False) -> ModelSpec:
    """The geometry that config.json states.

    Raises CheckpointError when a field is missing or of a wrong type, or when the activation is none of relu, relu2
    and fatrelu and `force` is not given.
    """
    config = {**config, "model_type": MODEL_TYPE}
    fields.sizes(config, _SIZES)
    fields.switches(config, _SWITCHES)
    fields.positive(config, "rms_norm_eps", 1e-6)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    fields.multiple("hidden_size", width, "num_attention_heads", heads)
    kv_heads = fields.optional_size(config, "num_key_value_heads", heads)
    fields.multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    check_rotary(config, fields.optional_size(config, "head_dim", width // heads))
    name, thresholds = activation(config, ACTIVATION_FIELD, "silu", config["num_hidden_layers"], force)
    return ModelSpec(
        model_type=MODEL_TYPE,
        num_layers=config["num_hidden_layers"],
        d_model=width,
        d_ff=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        activation=name,
        max_positions=fields.optional_size(config, "max_position_embeddings", _POSITIONS),
        parts=3,
        thresholds=thresholds,
        config=config,
    )


def canonical(name: str) -> str | None:
    """A checkpoint of the bare decoder (`layers.0...`) as `model.layers.0...`; None for stored rotary frequencies."""
    return shapes.canonical(name, _MODEL, ("embed_tokens", "layers", "norm"))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by name; a tied head is absent. Order: embed, layers, head."""
    width, queries = spec.d_model, spec.config["num_attention_heads"] * _head_width(spec)
    kv_heads, head_width = kv_shape(spec)
    attention, mlp = _switch(spec, "attention_bias"), _switch(spec, "mlp_bias")
    found: shapes.Shapes = {_EMBED: (spec.vocab_size, width)}
    for layer in range(spec.num_layers):
        prefix = f"{_LAYERS}{layer}."
        found |= shapes.linear(prefix + "self_attn.q_proj", queries, width, attention)
        for name in ("k_proj", "v_proj"):
            found |= shapes.linear(f"{prefix}self_attn.{name}", kv_heads * head_width, width, attention)
        found |= shapes.linear(prefix + "self_attn.o_proj", width, queries, attention)
        for name in ("gate_proj", "up_proj"):
            found |= shapes.linear(f"{prefix}mlp.{name}", spec.d_ff, width, mlp)
        found |= shapes.linear(prefix + "mlp.down_proj", width, spec.d_ff, mlp)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found |= shapes.norm(prefix + name, width, bias=False)
    found |= shapes.norm("model.norm", width, bias=False)
    if not _switch(spec, "tie_word_embeddings"):
        found[_HEAD] = (spec.vocab_size, width)
    return found


def tied(spec: ModelSpec) -> dict[str, str]:
    """A checkpoint with a tied head may hold it a second time: {'lm_head.weight': the embedding}."""
    return {_HEAD: _EMBED} if _switch(spec, "tie_word_embeddings") else {}


def ffn_names(spec: ModelSpec, layer: int) -> FfnNames:
    """The FFN tensors of a layer: gate_proj and up_proj [d_ff, d_model], down_proj [d_model, d_ff]."""
    prefix, bias = f"{_LAYERS}{layer}.mlp.", _switch(spec, "mlp_bias")
    return FfnNames(
        up=prefix + "up_proj.weight",
        up_bias=prefix + "up_proj.bias" if bias else None,
        down=prefix + "down_proj.weight",
        down_bias=prefix + "down_proj.bias" if bias else None,
        gate=prefix + "gate_proj.weight",
        gate_bias=prefix + "gate_proj.bias" if bias else None,
    )


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor belongs to, or None."""
    return shapes.number_after(_LAYERS, name)


def group_of(name: str) -> str:
    """'embed', 'layer.N' or 'head'. The head is what runs after the last layer; a tied head is the embedding."""
    layer = layer_of(name)
    return ("embed" if name == _EMBED else "head") if layer is None else f"layer.{layer}"


def model_class() -> Any:
    """LlamaForCausalLM."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM


def skeleton(spec: ModelSpec) -> Any:
    """LlamaForCausalLM on the meta device, without FFN matrices; see `workbench.models.build.skeleton`."""
    return build.skeleton(spec, model_class(), ACTIVATION_FIELD, install)


def install(model: Any, layer: int, module: nn.Module) -> None:
    """Put `module` where the layer's FFN runs: in place of `mlp`."""
    model.model.layers[layer].mlp = module


def ffn_norm(model: Any, layer: int) -> Any | None:
    """post_attention_layernorm."""
    return model.model.layers[layer].post_attention_layernorm


def activated_linears(model: Any) -> list[Any]:
    """gate_proj of every layer of a dense model."""
    return [layer.mlp.gate_proj for layer in model.model.layers]


def set_activation(model: Any, layer: int, module: nn.Module) -> None:
    """Put `module` in place of a dense model's act_fn."""
    model.model.layers[layer].mlp.act_fn = module


def kv_shape(spec: ModelSpec) -> tuple[int, int]:
    """Heads of the KV cache, num_key_value_heads, and the width of each."""
    heads = spec.config["num_attention_heads"]
    return spec.config.get("num_key_value_heads") or heads, _head_width(spec)


def _head_width(spec: ModelSpec) -> int:
    return spec.config.get("head_dim") or spec.d_model // spec.config["num_attention_heads"]


def _switch(spec: ModelSpec, name: str) -> bool:
    return spec.config.get(name, _SWITCHES[name])
