"""Named geometries: the facts of published config.json files, with activations that leave neurons at exactly zero.

OPT (Zhang et al. 2022), Persimmon-8B (Adept 2023) as they are. Falcon-7B, Phi-2 and Llama-2-7B are published with GELU
or SiLU; here they have what their relufied forms have: ReLU (Mirzadeh et al. 2023), and FATReLU for Llama (ProSparse,
Song et al. 2024).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.errors import CheckpointError, SpecError


def _opt(layers: int, d_model: int, heads: int, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": "relu",
        "num_hidden_layers": layers,
        "hidden_size": d_model,
        "word_embed_proj_dim": d_model,
        "ffn_dim": 4 * d_model,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        **fields,
    }


GEOMETRIES: dict[str, dict[str, Any]] = {
    "opt-125m": _opt(12, 768, 12),
    "opt-350m": _opt(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-2.7b": _opt(32, 2560, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "falcon-7b": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "activation": "relu",
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "vocab_size": 65024,
        "max_position_embeddings": 2048,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "alibi": False,
        "bias": False,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bos_token_id": 11,
        "eos_token_id": 11,
    },
    "persimmon-8b": {
        "architectures": ["PersimmonForCausalLM"],
        "model_type": "persimmon",
        "hidden_act": "relu2",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_attention_heads": 64,
        "vocab_size": 262144,
        "max_position_embeddings": 16384,
        "rope_theta": 25000.0,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "phi-2": {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "hidden_act": "relu",
        "num_hidden_layers": 32,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 32,
        "vocab_size": 51200,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": False,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attention_dropout": 0.0,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    "llama-2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "fatrelu",
        "hidden_act_param": 0.01,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def geometry(wanted: str | Path) -> tuple[str, dict[str, Any]]:
    """A geometry's name and config: one of GEOMETRIES, or read from a config.json or the directory that holds one.

    Raises SpecError, with the known names, when it is neither; CheckpointError when the file cannot be read.
    """
    if str(wanted) in GEOMETRIES:
        return str(wanted), dict(GEOMETRIES[str(wanted)])
    path = Path(wanted)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise SpecError(f"{wanted}: no such geometry; give a config.json, or one of {', '.join(GEOMETRIES)}")
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON; give a model's config.json") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{file}: no model_type; give a model's config.json")
    # A quantization is of the weights, which are not used.
    config.pop("quantization_config", None)
    return file.resolve().parent.name if file.name == "config.json" else file.stem, config
