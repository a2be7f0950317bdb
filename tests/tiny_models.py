"""Tiny random checkpoints in Hugging Face's layout, written by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig, OPTForCausalLM
from transformers.utils import logging


def make_opt(
    path: str | Path, *, seed: int = 0, dtype: str = "float32", max_shard_size: str | None = None, **overrides: Any
) -> Path:
    """Write a random OPT checkpoint at `path` and return it.

    Two layers, d_model 64, d_ff 256, vocab 128, 128 positions, ReLU; `overrides` are OPTConfig fields. All weights and
    biases are random and not near zero, so that no two tensors, and no two neurons, are alike. `max_shard_size`
    (such as '100KB') makes it sharded.
    """
    fields = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "ffn_dim": 256,
        "vocab_size": 128,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "activation_function": "relu",
        **overrides,
    }
    fields.setdefault("word_embed_proj_dim", fields["hidden_size"])
    model = OPTForCausalLM(OPTConfig(**fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.05
            norm = "layer_norm" in name and name.endswith("weight")
            parameter.copy_(1 + drawn if norm else drawn)
    return _save(model, path, dtype, max_shard_size)


_GEOMETRY: dict[str, dict[str, Any]] = {
    "falcon": {"ffn_hidden_size": 160, "activation": "relu"},
    "llama": {"intermediate_size": 160, "hidden_act": "relu"},
    "opt": {"ffn_dim": 160, "activation_function": "relu", "word_embed_proj_dim": 64},
    "persimmon": {"intermediate_size": 160},
    "phi": {"intermediate_size": 160, "hidden_act": "relu"},
}


def make_tiny(
    path: str | Path,
    model_type: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str | None = None,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of any supported architecture at `path` and return it.

    Two layers, d_model 64, d_ff 160, 4 heads, vocab 96, 64 positions, an activation that is exactly zero; `overrides`
    are fields of transformers' config. All weights, norms and biases are random, and large enough that every part of
    every layer shows in the logits.
    """
    fields = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        **_GEOMETRY[model_type],
        **overrides,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(drawn / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(drawn * 0.1 + (0 if name.endswith("bias") else 1))
    return _save(model, path, dtype, max_shard_size)


def _save(model: Any, path: str | Path, dtype: str, max_shard_size: str | None) -> Path:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size or "50GB")
    finally:
        if shown:
            logging.enable_progress_bar()
    return Path(path)


def edit_config(path: Path, remove: tuple[str, ...] = (), **fields: Any) -> None:
    """Change fields of a checkpoint's config.json."""
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in config.items() if name not in remove}))
