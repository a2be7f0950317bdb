"""OPT (Zhang et al. 2022): ReLU feed-forward networks, learned positions, tied head.

Names and shapes are those of transformers' OPTForCausalLM.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.models.family import FfnNames
from workbench.spec import ModelSpec

MODEL_TYPE = "opt"
POSITION_OFFSET = 2
"""Rows that OPT's position table has before position 0."""
_DECODER = "model.decoder."
_LAYER = re.compile(r"model\.decoder\.layers\.(\d+)\.")
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

    Raises CheckpointError when a field is missing or of a wrong type, or when the activation is not ReLU and `force`
    is not given: neurons that are never exactly zero cannot be left out.
    """
    for name in _SIZES:
        value = config.get(name)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"config.json: {name} is {value!r}, not a positive whole number; see its card")
    for name, default in _SWITCHES.items():
        if type(config.get(name, default)) is not bool:
            raise CheckpointError(f"config.json: {name} is {config[name]!r}, not true or false; see its card")
    projection = config.get("word_embed_proj_dim", config["hidden_size"])
    if projection is not None and (type(projection) is not int or projection < 1):
        raise CheckpointError(f"config.json: word_embed_proj_dim is {projection!r}, not a positive whole number")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if width % heads:
        raise CheckpointError(f"config.json: hidden_size {width} is not a multiple of num_attention_heads {heads}")
    activation = config.get("activation_function", "relu")
    if activation != "relu" and not force:
        raise CheckpointError(
            f"config.json: activation {activation!r} is not ReLU, so few neurons are zero; "
            f"run `workbench relufy` on the model first, or pass --force to convert it as it is"
        )
    return ModelSpec(
        model_type=MODEL_TYPE,
        num_layers=config["num_hidden_layers"],
        d_model=width,
        d_ff=config["ffn_dim"],
        vocab_size=config["vocab_size"],
        activation=str(activation),
        max_positions=config["max_position_embeddings"],
        config=config,
    )


def canonical(name: str) -> str | None:
    """`decoder.layers.0...` (facebook/opt-* of 2022) as `model.decoder.layers.0...`; None for fairseq's version tag."""
    renamed = "model." + name if name.startswith("decoder.") else name
    return None if renamed == _DECODER + "version" else renamed


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by name; the tied head is absent. Order: embed, layers, head."""
    width, embed = spec.d_model, _embed_width(spec)
    shapes: dict[str, tuple[int, ...]] = {
        _EMBED: (spec.vocab_size, embed),
        _DECODER + "embed_positions.weight": (spec.max_positions + POSITION_OFFSET, width),
    }
    if embed != width:
        shapes[_DECODER + "project_in.weight"] = (width, embed)
    for layer in range(spec.num_layers):
        prefix = f"{_DECODER}layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(spec, f"{prefix}self_attn.{name}", width, width)
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= _norm(spec, prefix + name)
        shapes |= _linear(spec, prefix + "fc1", spec.d_ff, width)
        shapes |= _linear(spec, prefix + "fc2", width, spec.d_ff)
    if _switch(spec, "do_layer_norm_before") and not _switch(spec, "_remove_final_layer_norm"):
        shapes |= _norm(spec, _DECODER + "final_layer_norm")
    if embed != width:
        shapes[_DECODER + "project_out.weight"] = (embed, width)
    if not _switch(spec, "tie_word_embeddings"):
        shapes[_HEAD] = (spec.vocab_size, embed)
    return shapes


def tied(spec: ModelSpec) -> dict[str, str]:
    """A checkpoint with a tied head may hold it a second time: {'lm_head.weight': the embedding}."""
    return {_HEAD: _EMBED} if _switch(spec, "tie_word_embeddings") else {}


def ffn_names(spec: ModelSpec, layer: int) -> FfnNames:
    """The FFN tensors of a layer: fc1 [d_ff, d_model], fc2 [d_model, d_ff]; biases are None without enable_bias."""
    prefix, bias = f"{_DECODER}layers.{layer}.", _switch(spec, "enable_bias")
    return FfnNames(
        up=prefix + "fc1.weight",
        up_bias=prefix + "fc1.bias" if bias else None,
        down=prefix + "fc2.weight",
        down_bias=prefix + "fc2.bias" if bias else None,
    )


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor belongs to, or None."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def group_of(name: str) -> str:
    """'embed', 'layer.N' or 'head'. The head is what runs after the last layer; a tied head is the embedding."""
    layer = layer_of(name)
    if layer is not None:
        return f"layer.{layer}"
    return "embed" if name.startswith((_DECODER + "embed_", _DECODER + "project_in")) else "head"


def skeleton(spec: ModelSpec) -> Any:
    """OPTForCausalLM on the meta device, in evaluation mode, with sdpa attention and without FFN matrices.

    Nothing is allocated. Its state dict's names are those of the store's resident tensors, fc1.bias and fc2.bias
    apart (the installed module has them), and lm_head.weight where it is tied: after `load_state_dict(...,
    assign=True)` call `model.tie_weights()`. A layer whose FFN was not installed raises RuntimeError when it runs.
    """
    from transformers import OPTConfig, OPTForCausalLM

    try:
        config = OPTConfig.from_dict({**_SWITCHES, **spec.config})
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = OPTForCausalLM(config)
    except Exception as error:  # transformers checks a config's fields with error classes of its own
        reason = " ".join(str(error).split())
        raise CheckpointError(f"config.json: transformers cannot build the model from it ({reason})") from error
    for layer in range(spec.num_layers):
        install(model, layer, _NotInstalled(layer))
    return model.eval().requires_grad_(False)


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


class _NotInstalled(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"layer {self.layer}: no FFN was installed in the skeleton")


def _switch(spec: ModelSpec, name: str) -> bool:
    return spec.config.get(name, _SWITCHES[name])


def _embed_width(spec: ModelSpec) -> int:
    # transformers reads an absent or null word_embed_proj_dim as hidden_size.
    return spec.config.get("word_embed_proj_dim") or spec.d_model


def _linear(spec: ModelSpec, name: str, out: int, inner: int) -> dict[str, tuple[int, ...]]:
    bias: dict[str, tuple[int, ...]] = {name + ".bias": (out,)} if _switch(spec, "enable_bias") else {}
    return {name + ".weight": (out, inner), **bias}


def _norm(spec: ModelSpec, name: str) -> dict[str, tuple[int, ...]]:
    if not _switch(spec, "layer_norm_elementwise_affine"):
        return {}
    return {name + ".weight": (spec.d_model,), name + ".bias": (spec.d_model,)}
