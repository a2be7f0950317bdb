"""Falcon (Almazrouei et al. 2023), in its three decoders: in parallel, in sequence, and that of Falcon-40B.

Names and shapes are those of transformers' FalconForCausalLM. Checkpoints of early 2023 ('RefinedWeb',
'RefinedWebModel') hold the same tensors under another spelling of the config, and run here without their own code.
The published models use GELU: `workbench relufy` first.
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

MODEL_TYPE = "falcon"
ALIASES = ("RefinedWeb", "RefinedWebModel")
ACTIVATION_FIELD = "activation"
_MODEL, _LAYERS = "transformer.", "transformer.h."
_EMBED, _HEAD = "transformer.word_embeddings.weight", "lm_head.weight"
_RENAMED = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "n_embed": "hidden_size",
}
"""Fields of early configs. transformers takes its defaults, those of Falcon-7B, where it does not know a name."""
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
_SWITCHES = {
    "alibi": False,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "bias": False,
    "tie_word_embeddings": True,
}
"""Optional settings and what their absence means in a Falcon config."""
_POSITIONS = 2048
"""max_position_embeddings where the config has none."""


def spec(config: dict[str, Any], force: bool = False) -> ModelSpec:
    """The geometry that config.json states.

    Raises CheckpointError when a field is missing or of a wrong type, when switches contradict each other, or when
    the activation is none of relu, relu2 and fatrelu and `force` is not given.
    """
    config = _todays(config)
    fields.sizes(config, _SIZES)
    fields.switches(config, _SWITCHES)
    fields.positive(config, "layer_norm_epsilon", 1e-5)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    fields.multiple("hidden_size", width, "num_attention_heads", heads)
    _check_decoder(config, heads)
    check_rotary(config, width // heads)
    name, thresholds = activation(config, ACTIVATION_FIELD, "gelu", config["num_hidden_layers"], force)
    return ModelSpec(
        model_type=MODEL_TYPE,
        num_layers=config["num_hidden_layers"],
        d_model=width,
        d_ff=fields.optional_size(config, "ffn_hidden_size", 4 * width),
        vocab_size=config["vocab_size"],
        activation=name,
        max_positions=fields.optional_size(config, "max_position_embeddings", _POSITIONS),
        thresholds=thresholds,
        config=config,
    )


def _todays(config: dict[str, Any]) -> dict[str, Any]:
    """The config in transformers' present spelling."""
    found = {**config, "model_type": MODEL_TYPE}
    for old, new in _RENAMED.items():
        if old in found:
            value = found.pop(old)
            if found.setdefault(new, value) != value:
                raise CheckpointError(f"config.json: {old} is {value!r} and {new} {found[new]!r}; keep the right one")
    if config.get("model_type") == "RefinedWeb":  # Falcon-40B; the 7B and 1B models are 'RefinedWebModel'
        found.setdefault("new_decoder_architecture", True)
    return found


def _check_decoder(config: dict[str, Any], heads: int) -> None:
    """Combinations that transformers would build and then fail to run."""
    new, multi, parallel = (_on(config, n) for n in ("new_decoder_architecture", "multi_query", "parallel_attn"))
    kv_heads = fields.optional_size(config, "num_kv_heads", heads)
    if new:
        fields.multiple("num_attention_heads", heads, "num_kv_heads", kv_heads)
    elif not multi and kv_heads != heads:
        raise CheckpointError(
            f"config.json: num_kv_heads is {kv_heads} for {heads} attention heads, without new_decoder_architecture; "
            f"see its card"
        )
    if new and not parallel:
        raise CheckpointError("config.json: new_decoder_architecture without parallel_attn; see its card")
    norms = config.get("num_ln_in_parallel_attn")
    if norms not in ((None, 1, 2) if new else (None, 1)) or isinstance(norms, bool):
        raise CheckpointError(
            f"config.json: num_ln_in_parallel_attn is {norms!r}, which this decoder does not have; see its card"
        )


def canonical(name: str) -> str | None:
    """A checkpoint of the bare decoder (`h.0...`) as `transformer.h.0...`; None for stored rotary frequencies."""
    return shapes.canonical(name, _MODEL, ("word_embeddings", "h", "ln_f"))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by name; a tied head is absent. Order: embed, layers, head."""
    width, bias = spec.d_model, _on(spec.config, "bias")
    found: shapes.Shapes = {_EMBED: (spec.vocab_size, width)}
    for layer in range(spec.num_layers):
        prefix = f"{_LAYERS}{layer}."
        found |= shapes.linear(prefix + "self_attention.query_key_value", _fused_width(spec), width, bias)
        found |= shapes.linear(prefix + "self_attention.dense", width, width, bias)
        found |= shapes.linear(prefix + "mlp.dense_h_to_4h", spec.d_ff, width, bias)
        found |= shapes.linear(prefix + "mlp.dense_4h_to_h", width, spec.d_ff, bias)
        for name in _norms(spec):
            found |= shapes.norm(prefix + name, width)
    found |= shapes.norm(_MODEL + "ln_f", width)
    if not _on(spec.config, "tie_word_embeddings"):
        found[_HEAD] = (spec.vocab_size, width)
    return found


def tied(spec: ModelSpec) -> dict[str, str]:
    """A checkpoint with a tied head may hold it a second time: {'lm_head.weight': the embedding}."""
    return {_HEAD: _EMBED} if _on(spec.config, "tie_word_embeddings") else {}


def ffn_names(spec: ModelSpec, layer: int) -> FfnNames:
    """The FFN tensors of a layer: dense_h_to_4h [d_ff, d_model], dense_4h_to_h [d_model, d_ff]; biases with `bias`."""
    prefix, bias = f"{_LAYERS}{layer}.mlp.", _on(spec.config, "bias")
    return FfnNames(
        up=prefix + "dense_h_to_4h.weight",
        up_bias=prefix + "dense_h_to_4h.bias" if bias else None,
        down=prefix + "dense_4h_to_h.weight",
        down_bias=prefix + "dense_4h_to_h.bias" if bias else None,
    )


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor belongs to, or None."""
    return shapes.number_after(_LAYERS, name)


def group_of(name: str) -> str:
    """'embed', 'layer.N' or 'head'. The head is what runs after the last layer; a tied head is the embedding."""
    layer = layer_of(name)
    return ("embed" if name == _EMBED else "head") if layer is None else f"layer.{layer}"


def model_class() -> Any:
    """FalconForCausalLM."""
    from transformers import FalconForCausalLM

    return FalconForCausalLM


def skeleton(spec: ModelSpec) -> Any:
    """FalconForCausalLM on the meta device, without FFN matrices; see `workbench.models.build.skeleton`.

    sdpa attention is not only faster here: transformers' eager attention adds alibi's biases twice.
    """
    return build.skeleton(spec, model_class(), ACTIVATION_FIELD, install)


def install(model: Any, layer: int, module: nn.Module) -> None:
    """Put `module` where the layer's FFN runs: in place of `mlp`. The layer adds to its output in place."""
    model.transformer.h[layer].mlp = module


def ffn_norm(model: Any, layer: int) -> Any | None:
    """ln_mlp where attention has a norm of its own; input_layernorm where both share one; post_attention_layernorm
    where they do not run beside each other."""
    block = model.transformer.h[layer]
    names = ("ln_mlp", "post_attention_layernorm", "input_layernorm")
    return next(getattr(block, name) for name in names if hasattr(block, name))


def activated_linears(model: Any) -> list[Any]:
    """dense_h_to_4h of every layer of a dense model."""
    return [layer.mlp.dense_h_to_4h for layer in model.transformer.h]


def set_activation(model: Any, layer: int, module: nn.Module) -> None:
    """Put `module` in place of a dense model's act."""
    model.transformer.h[layer].mlp.act = module


def kv_shape(spec: ModelSpec) -> tuple[int, int]:
    """Heads of the KV cache and the width of each.

    One head with multi_query. The decoder of Falcon-40B has num_kv_heads, but transformers repeats them for every
    attention head before it caches them.
    """
    heads = spec.config["num_attention_heads"]
    one = _on(spec.config, "multi_query") and not _on(spec.config, "new_decoder_architecture")
    return 1 if one else heads, spec.d_model // heads


def _fused_width(spec: ModelSpec) -> int:
    """Rows of query_key_value: all queries, then the keys and values of each key-value head."""
    heads, (cached, head_width) = spec.config["num_attention_heads"], kv_shape(spec)
    new = _on(spec.config, "new_decoder_architecture")
    return (heads + 2 * (spec.config.get("num_kv_heads") or heads if new else cached)) * head_width


def _norms(spec: ModelSpec) -> tuple[str, ...]:
    if not _on(spec.config, "parallel_attn"):
        return ("input_layernorm", "post_attention_layernorm")
    two = _on(spec.config, "new_decoder_architecture") and spec.config.get("num_ln_in_parallel_attn") != 1
    return ("ln_attn", "ln_mlp") if two else ("input_layernorm",)


def _on(config: dict[str, Any], name: str) -> bool:
    return config.get(name, _SWITCHES[name])
