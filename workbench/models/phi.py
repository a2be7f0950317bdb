"""Phi-1, Phi-1.5 and Phi-2 (Microsoft 2023): attention and FFN in parallel, partly rotated heads, biases throughout.

Names and shapes are those of transformers' PhiForCausalLM. The published models use GELU: `workbench relufy` first.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from workbench.errors import CheckpointError
from workbench.models import build, fields, shapes
from workbench.models.activation import activation
from workbench.models.family import FfnNames
from workbench.models.rotary import check_rotary
from workbench.spec import ModelSpec

MODEL_TYPE = "phi"
ALIASES = ()
ACTIVATION_FIELD = "hidden_act"
_MODEL, _LAYERS = "model.", "model.layers."
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
_SWITCHES = {"qk_layernorm": False, "tie_word_embeddings": False}
"""Optional settings and what their absence means in a Phi config."""
_POSITIONS, _ROTATED = 2048, 0.5
"""max_position_embeddings and partial_rotary_factor where the config has none."""


def spec(config: dict[str, Any], force: bool = False) -> ModelSpec:
    """The geometry that config.json states.

    Raises CheckpointError when a field is missing or of a wrong type, or when the activation is none of relu, relu2
    and fatrelu and `force` is not given.
    """
    fields.sizes(config, _SIZES)
    fields.switches(config, _SWITCHES)
    fields.positive(config, "layer_norm_eps", 1e-5)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    fields.multiple("hidden_size", width, "num_attention_heads", heads)
    kv_heads = fields.optional_size(config, "num_key_value_heads", heads)
    fields.multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    if fields.optional_size(config, "head_dim", width // heads) != width // heads:
        raise CheckpointError(f"config.json: head_dim is {config['head_dim']}, Phi's heads have {width // heads}")
    check_rotary(config, width // heads, _ROTATED)
    name, thresholds = activation(config, ACTIVATION_FIELD, "gelu_new", config["num_hidden_layers"], force)
    return ModelSpec(
        model_type=MODEL_TYPE,
        num_layers=config["num_hidden_layers"],
        d_model=width,
        d_ff=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        activation=name,
        max_positions=fields.optional_size(config, "max_position_embeddings", _POSITIONS),
        thresholds=thresholds,
        config=config,
    )


def canonical(name: str) -> str | None:
    """A checkpoint of the bare decoder (`layers.0...`) as `model.layers.0...`; None for stored rotary frequencies."""
    return shapes.canonical(name, _MODEL, ("embed_tokens", "layers", "final_layernorm"))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by name; a tied head's matrix is absent. Order: embed, layers, head."""
    width = spec.d_model
    kv_heads, head_width = kv_shape(spec)
    found: shapes.Shapes = {_EMBED: (spec.vocab_size, width)}
    for layer in range(spec.num_layers):
        prefix = f"{_LAYERS}{layer}."
        found |= shapes.linear(prefix + "self_attn.q_proj", width, width, bias=True)
        for name in ("k_proj", "v_proj"):
            found |= shapes.linear(f"{prefix}self_attn.{name}", kv_heads * head_width, width, bias=True)
        found |= shapes.linear(prefix + "self_attn.dense", width, width, bias=True)
        if _switch(spec, "qk_layernorm"):
            for name in ("q_layernorm", "k_layernorm"):
                found |= shapes.norm(f"{prefix}self_attn.{name}", head_width)
        found |= shapes.linear(prefix + "mlp.fc1", spec.d_ff, width, bias=True)
        found |= shapes.linear(prefix + "mlp.fc2", width, spec.d_ff, bias=True)
        found |= shapes.norm(prefix + "input_layernorm", width)
    found |= shapes.norm(_MODEL + "final_layernorm", width)
    found |= shapes.linear("lm_head", spec.vocab_size, width, bias=True)
    if _switch(spec, "tie_word_embeddings"):
        del found[_HEAD]
    return found


def tied(spec: ModelSpec) -> dict[str, str]:
    """A checkpoint with a tied head may hold it a second time: {'lm_head.weight': the embedding}."""
    return {_HEAD: _EMBED} if _switch(spec, "tie_word_embeddings") else {}


def ffn_names(spec: ModelSpec, layer: int) -> FfnNames:
    """The FFN tensors of a layer: fc1 [d_ff, d_model], fc2 [d_model, d_ff], with biases."""
    prefix = f"{_LAYERS}{layer}.mlp."
    return FfnNames(
        up=prefix + "fc1.weight",
        up_bias=prefix + "fc1.bias",
        down=prefix + "fc2.weight",
        down_bias=prefix + "fc2.bias",
    )


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor belongs to, or None."""
    return shapes.number_after(_LAYERS, name)


def group_of(name: str) -> str:
    """'embed', 'layer.N' or 'head'. The head is what runs after the last layer; a tied head is the embedding."""
    layer = layer_of(name)
    return ("embed" if name == _EMBED else "head") if layer is None else f"layer.{layer}"


def model_class() -> Any:
    """PhiForCausalLM."""
    from transformers import PhiForCausalLM

    return PhiForCausalLM


def skeleton(spec: ModelSpec) -> Any:
    """PhiForCausalLM on the meta device, without FFN matrices; see `workbench.models.build.skeleton`."""
    return build.skeleton(spec, model_class(), ACTIVATION_FIELD, install)


def install(model: Any, layer: int, module: nn.Module) -> None:
    """Put `module` where the layer's FFN runs: in place of `mlp`."""
    model.model.layers[layer].mlp = module


def ffn_norm(model: Any, layer: int) -> Any | None:
    """input_layernorm, which attention is given too."""
    return model.model.layers[layer].input_layernorm


def activated_linears(model: Any) -> list[Any]:
    """fc1 of every layer of a dense model."""
    return [layer.mlp.fc1 for layer in model.model.layers]


def set_activation(model: Any, layer: int, module: nn.Module) -> None:
    """Put `module` in place of a dense model's activation_fn."""
    model.model.layers[layer].mlp.activation_fn = module


def kv_shape(spec: ModelSpec) -> tuple[int, int]:
    """Heads of the KV cache, num_key_value_heads, and the width of each."""
    heads = spec.config["num_attention_heads"]
    return spec.config.get("num_key_value_heads") or heads, spec.d_model // heads


def _switch(spec: ModelSpec, name: str) -> bool:
    return spec.config.get(name, _SWITCHES[name])
