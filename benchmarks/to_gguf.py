"""A llama checkpoint in Hugging Face's layout as a GGUF file of the same weights and dtype, without a vocabulary.

For comparisons that feed token numbers: llama.cpp reads and multiplies the same bytes. It knows SiLU only, so a model
with another activation computes other values at the same cost. Needs the `gguf` package.

    python benchmarks/to_gguf.py CHECKPOINT FILE.gguf
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor. ValueError for one that it has none for."""
    if name in NAMES:
        return NAMES[name]
    parts = name.split(".")
    if name.startswith("model.layers.") and ".".join(parts[3:-1]) in NAMES:
        return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:-1])]}.{parts[-1]}"
    raise ValueError(f"{name}: a tensor that a llama model has not")


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a q or k projection as llama.cpp rotates them: the two of a pair side by side, not half a head apart."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def tensors(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names as llama.cpp has them and tensors, one in memory at a time."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                tensor = opened.get_tensor(name)
                if ".q_proj." in name:
                    tensor = interleaved(tensor, heads)
                elif ".k_proj." in name:
                    tensor = interleaved(tensor, kv_heads)
                yield gguf_name(name), tensor


def to_gguf(checkpoint: Path, target: Path) -> None:
    """Write `target`, whole or not at all. ValueError for a checkpoint that is no llama's."""
    import gguf  # pyright: ignore[reportMissingImports]

    config = json.loads((checkpoint / "config.json").read_text())
    if config.get("model_type") != "llama":
        raise ValueError(f"{checkpoint}: model_type is {config.get('model_type')}; only a llama can be written as GGUF")
    temporary = target.with_name(target.name + ".partial")
    writer = gguf.GGUFWriter(temporary, "llama", use_temp_file=False)
    heads, width = config["num_attention_heads"], config["hidden_size"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_rope_dimension_count(config.get("head_dim") or width // heads)
    writer.add_rope_freq_base(float(config.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    kinds = {torch.float32: gguf.GGMLQuantizationType.F32, torch.float16: gguf.GGMLQuantizationType.F16,
             torch.bfloat16: gguf.GGMLQuantizationType.BF16}  # fmt: skip
    each = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors(checkpoint, config)]
    for name, shape, dtype in each:
        kind = kinds[dtype if len(shape) > 1 else torch.float32]
        size = 4 if kind is gguf.GGMLQuantizationType.F32 else 2
        raw = np.dtype(np.float32 if size == 4 else np.float16)
        writer.add_tensor_info(name, list(shape), raw, int(np.prod(shape)) * size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in tensors(checkpoint, config):
        stored = tensor.contiguous() if tensor.dim() > 1 else tensor.float()
        writer.write_tensor_data(stored.view(torch.uint8).numpy().view(np.uint8).reshape(-1))
    writer.close()
    os.replace(temporary, target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    to_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
