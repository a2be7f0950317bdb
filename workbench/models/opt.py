"""OPT (Zhang et al. 2022): ReLU feed-forward networks, learned positions, tied head.

Names and shapes are those of transformers' OPTForCausalLM.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from workbench.models import build, fields, shapes
from workbench.models.activation import activation
from workbench.models.family import FfnNames
from workbench.spec import ModelSpec

MODEL_TYPE = "opt"
ALIASES = ()
ACTIVATION_FIELD = "activation_function"
POSITION_OFFSET = 2
"""Rows that OPT's position table has before position 0."""
_DECODER = "model.decoder."
_LAYERS = _DECODER + "layers."
_EMBED, _HEAD = _DECODER + "embed_tokens.weight", "lm_head.weight"
_SIZES = ("num_hidden_layers", "hidden_size", "ffn_dim", "vocab_size", "max_position_embeddings", "num_attention_heads")
_SWITCHES = {
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}
"""Optional settings and what their absence means in an OPT config."""


def spec(config: dict[str, Any], force: bool = False) -> ModelSpec:
    """The geometry that config.json states.

    Raises CheckpointError when a field is missing or of a wrong type, or when the activation is none of relu, relu2
    and fatrelu and `force` is not given.
    """
    fields.sizes(config, _SIZES)
    fields.switches(config, _SWITCHES)
    fields.optional_size(config, "word_embed_proj_dim", config["hidden_size"])
    fields.multiple("hidden_size", config["hidden_size"], "num_attention_heads", config["num_attention_heads"])
    name, thresholds = activation(config, ACTIVATION_FIELD, "relu", config["num_hidden_layers"], force)
    return ModelSpec(
        model_type=MODEL_TYPE,
        num_layers=config["num_hidden_layers"],
        d_model=config["hidden_size"],
        d_ff=config["ffn_dim"],
        vocab_size=config["vocab_size"],
        activation=name,
        max_positions=config["max_position_embeddings"],
        thresholds=thresholds,
        config=config,
    )


def canonical(name: str) -> str | None:
    """`decoder.layers.0...` (facebook/opt-* of 2022) as `model.decoder.layers.0...`; None for fairseq's version tag."""
    renamed = "model." + name if name.startswith("decoder.") else name
    return None if renamed == _DECODER + "version" else renamed


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by name; the tied head is absent. Order: embed, layers, head."""
    width, embed, bias = spec.d_model, _embed_width(spec), _switch(spec, "enable_bias")
    found: shapes.Shapes = {
        _EMBED: (spec.vocab_size, embed),
        _DECODER + "embed_positions.weight": (spec.max_positions + POSITION_OFFSET, width),
    }
    if embed != width:
        found[_DECODER + "project_in.weight"] = (width, embed)
    for layer in range(spec.num_layers):
        prefix = f"{_LAYERS}{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= shapes.linear(f"{prefix}self_attn.{name}", width, width, bias)
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            found |= _norm(spec, prefix + name)
        found |= shapes.linear(prefix + "fc1", spec.d_ff, width, bias)
        found |= shapes.linear(prefix + "fc2", width, spec.d_ff, bias)
    if _switch(spec, "do_layer_norm_before") and not _switch(spec, "_remove_final_layer_norm"):
        found |= _norm(spec, _DECODER + "final_layer_norm")
    if embed != width:
        found[_DECODER + "project_out.weight"] = (embed, width)
    if not _switch(spec, "tie_word_embeddings"):
        found[_HEAD] = (spec.vocab_size, embed)
    return found


def tied(spec: ModelSpec) -> dict[str, str]:
    """A checkpoint with a tied head may hold it a second time: {'lm_head.weight': the embedding}."""
    return {_HEAD: _EMBED} if _switch(spec, "tie_word_embeddings") else {}


def ffn_names(spec: ModelSpec, layer: int) -> FfnNames:
    """The FFN tensors of a layer: fc1 [d_ff, d_model], fc2 [d_model, d_ff]; biases are None without enable_bias."""
    prefix, bias = f"{_LAYERS}{layer}.", _switch(spec, "enable_bias")
    return FfnNames(
        up=prefix + "fc1.weight",
        up_bias=prefix + "fc1.bias" if bias else None,
        down=prefix + "fc2.weight",
        down_bias=prefix + "fc2.bias" if bias else None,
    )


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor belongs to, or None."""
    return shapes.number_after(_LAYERS, name)


def group_of(name: str) -> str:
    """'embed', 'layer.N' or 'head'. The head is what runs after the last layer; a tied head is the embedding."""
    layer = layer_of(name)
    if layer is not None:
        return f"layer.{layer}"
    return "embed" if name.startswith((_DECODER + "embed_", _DECODER + "project_in")) else "head"


def model_class() -> Any:
    """OPTForCausalLM."""
    from transformers import OPTForCausalLM

    return OPTForCausalLM


def skeleton(spec: ModelSpec) -> Any:
    """OPTForCausalLM on the meta device, without FFN matrices; see `workbench.models.build.skeleton`."""
    return build.skeleton(spec, model_class(), ACTIVATION_FIELD, install)


def install(model: Any, layer: int, module: nn.Module) -> None:
    """Put `module` where the layer's FFN runs.

    It is given x [tokens, d_model] (after the layer's norm where do_layer_norm_before; batch and time are one axis)
    and returns fc2(relu(fc1(x))), [tokens, d_model], both biases included. The residual, and the norm of models with
    do_layer_norm_before=False, stay with transformers.
    """
    decoder_layer = model.model.decoder.layers[layer]
    decoder_layer.fc1 = module
    decoder_layer.activation_fn = nn.Identity()
    decoder_layer.fc2 = nn.Identity()


def ffn_norm(model: Any, layer: int) -> Any | None:
    """final_layer_norm; None where norms follow the sublayers (do_layer_norm_before=False)."""
    decoder_layer = model.model.decoder.layers[layer]
    return decoder_layer.final_layer_norm if decoder_layer.do_layer_norm_before else None


def activated_linears(model: Any) -> list[Any]:
    """fc1 of every layer of a dense model."""
    return [layer.fc1 for layer in model.model.decoder.layers]


def set_activation(model: Any, layer: int, module: nn.Module) -> None:
    """Put `module` in place of a dense model's activation_fn."""
    model.model.decoder.layers[layer].activation_fn = module


def kv_shape(spec: ModelSpec) -> tuple[int, int]:
    """Heads of the KV cache and the width of each."""
    heads = spec.config["num_attention_heads"]
    return heads, spec.d_model // heads


def _switch(spec: ModelSpec, name: str) -> bool:
    return spec.config.get(name, _SWITCHES[name])


def _embed_width(spec: ModelSpec) -> int:
    # transformers reads an absent or null word_embed_proj_dim as hidden_size.
    return spec.config.get("word_embed_proj_dim") or spec.d_model


def _norm(spec: ModelSpec, name: str) -> shapes.Shapes:
    return shapes.norm(name, spec.d_model) if _switch(spec, "layer_norm_elementwise_affine") else {}
