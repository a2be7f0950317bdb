"""A dense OPT checkpoint at a named geometry: random weights, but sparsity and reuse as published.

For latency work without the real checkpoint. A naive N(0, 0.02) model is useless for that: its neighbouring tokens
share nearly all neurons, which flatters the window. Here the FFN's input is, after its layer norm, one slow part (the
position embedding: a constant, and a drift over 32 to 512 tokens) and one part that is new with each token (the
token's embedding); attention and FFN add little to the residual stream. Each layer has its own fc1 = B A + noise of
rank 128, so a neuron's pre-activation is the same mixture, and a true low-rank predictor exists: A and B. The slow
share is solved for such that, when 10% of a layer's neurons are predicted for a token (3% fire), five tokens together
use 24% (the paper's k = 4, OPT-6.7B); with this drift a token then adds 2.4%.

The checkpoint is a real dense model in Hugging Face's layout, so the oracle's parity with transformers holds on it.
Beside it, OUT-predictors holds the factors as predictors. Thresholds and fc1 biases are calibrated on one stream of
random tokens that runs through transformers' own decoder layer as the layers are made; reuse and the predictors'
quality are measured on another, at positions 128 to 400, and printed for each layer. Memory is bounded by the largest
of: a layer, the embedding.

    python benchmarks/opt_geometry.py OUT [--geometry opt-1.3b] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import OPTConfig
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from workbench.analysis.reuse import Reuse, ids_of, reuse
from workbench.models.checkpoint import Checkpoint
from workbench.models.opt import POSITION_OFFSET
from workbench.models.weights import Weights
from workbench.predictor.card import SCHEMA
from workbench.predictor.fingerprint import fingerprint
from workbench.predictor.low_rank import LayerPredictor, Predictors
from workbench.predictor.metrics import count


@dataclass(frozen=True)
class Geometry:
    """Sizes of an OPT model, pre-norm, with a tied head."""

    layers: int
    d_model: int
    d_ff: int
    heads: int
    vocab: int = 50272
    positions: int = 2048

    def config(self) -> dict[str, Any]:
        """config.json; `synthetic` is what records look at."""
        return {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "synthetic": True,
            "activation_function": "relu",
            "num_hidden_layers": self.layers,
            "hidden_size": self.d_model,
            "word_embed_proj_dim": self.d_model,
            "ffn_dim": self.d_ff,
            "num_attention_heads": self.heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "do_layer_norm_before": True,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 1,
            "dtype": "float32",
        }


GEOMETRIES = {
    "opt-125m": Geometry(12, 768, 3072, 12),
    "opt-350m": Geometry(24, 1024, 4096, 16),  # pre-norm and without its narrow embedding, unlike the real one
    "opt-1.3b": Geometry(24, 2048, 8192, 32),
}
RANK = 128
ACTIVE, PREDICTED, WINDOW = 0.03, 0.10, 4
KEPT = 0.245  # solved for; a little over the 24% that shall come out, since what attention adds is slow too
SCALE = 0.04  # of the residual stream: logits stay of the size that trained models have
NOISE = 0.1  # of fc1 beside its factors, relative
ADDED = 0.02  # what one layer's attention, and its FFN, add to the residual stream, relative to SCALE
DRIFT, PERIODS = 0.5, (32.0, 128.0, 512.0)  # share of the slow part that moves; tokens a turn
FROM, TO = 128, 400  # positions that are measured


def window_shares(slow: float, neurons: int = 100_000, seed: int = 0) -> tuple[float, float]:
    """(kept, new) shares of the FFN: what WINDOW + 1 tokens use together, and what the last of them adds.

    By simulation. A score is sqrt(slow) S + sqrt(1 - slow) T, both standard normal: T new with each token, S the
    neuron's own and drifting as the position embedding does; the highest PREDICTED are taken.
    """
    rng = np.random.default_rng(seed)
    at = np.arange(WINDOW + 1)
    constant, turn = rng.standard_normal((neurons, 1)), rng.standard_normal((len(PERIODS), 2, neurons, 1))
    angles = [2 * np.pi * at / period for period in PERIODS]
    drift = sum(c * np.cos(angle) + s * np.sin(angle) for angle, (c, s) in zip(angles, turn, strict=True))
    s = math.sqrt(1 - DRIFT) * constant + math.sqrt(DRIFT / len(PERIODS)) * drift
    scores = math.sqrt(slow) * s + math.sqrt(1 - slow) * rng.standard_normal((neurons, WINDOW + 1))
    fires = scores > statistics.NormalDist().inv_cdf(1 - PREDICTED)
    return float(fires.any(1).mean()), float((fires[:, -1] & ~fires[:, :-1].any(1)).mean())


def solve_slow() -> float:
    """The slow share of a score's variance for which WINDOW + 1 tokens use KEPT of the neurons."""
    low, high = 0.01, 0.99
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if window_shares(middle)[0] > KEPT else (low, middle)
    return low


def embeddings(geometry: Geometry, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token [vocab, d] and position [positions + 2, d] embeddings: the fast and the slow part of the stream."""
    # The noise of fc1 is mixed alike, since it sees the same input; the stream's own additions are small.
    slow = solve_slow()
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randn(geometry.vocab, geometry.d_model, generator=rng) * (SCALE * math.sqrt(1 - slow))
    constant = torch.randn(geometry.d_model, generator=rng)
    turn = 2 * math.pi * torch.rand(len(PERIODS), geometry.d_model, generator=rng)
    at = torch.arange(geometry.positions + POSITION_OFFSET, dtype=torch.float32)
    drift = sum(
        (torch.cos(2 * math.pi * at[:, None] / period + turn[n]) for n, period in enumerate(PERIODS)),
        torch.zeros(len(at), geometry.d_model),
    ) * math.sqrt(2 / len(PERIODS))
    positions = SCALE * math.sqrt(slow) * (math.sqrt(1 - DRIFT) * constant + math.sqrt(DRIFT) * drift)
    return tokens, positions


def layer_weights(geometry: Geometry, seed: int, layer: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, Any]:
    """A layer's tensors by their names within it, fc1.bias still zero; and the factors A [r, d], B [d_ff, r] of fc1."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + layer + 1)
    d, d_ff = geometry.d_model, geometry.d_ff
    rank = min(RANK, d // 2)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=rng).mul_(std)

    a = normal(rank, d, 1 / math.sqrt(d)).half().float()  # as the predictors store them
    b = normal(d_ff, rank, 1 / math.sqrt(rank)).half().float()
    up = (b @ a).add_(normal(d_ff, d, NOISE / math.sqrt(d)))
    tensors = {"fc1.weight": up, "fc1.bias": torch.zeros(d_ff)}
    # A neuron that fires has about 0.4; so this many of them add ADDED to the stream.
    tensors["fc2.weight"] = normal(d, d_ff, ADDED * SCALE / (0.5 * math.sqrt(ACTIVE * d_ff)))
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors[f"self_attn.{name}.weight"] = normal(d, d, 1 / math.sqrt(d))
    tensors["self_attn.out_proj.weight"] = normal(d, d, ADDED * SCALE / math.sqrt(d))
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "fc2"):
        tensors[f"{name}.bias"] = normal(1, d, 0.01 * SCALE)[0]
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        tensors |= {f"{name}.weight": torch.ones(d), f"{name}.bias": torch.zeros(d)}
    return tensors, a, b


@dataclass
class Probe:
    """Two streams of tokens on their way through the model: [0] to calibrate with, [1] to measure on."""

    config: OPTConfig
    hidden: torch.Tensor  # [2, TO, d]

    def pass_layer(
        self, layer: int, tensors: dict[str, torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> tuple[LayerPredictor, dict[str, float], Reuse]:
        """Run one layer; fills in its fc1.bias. The predictor, its quality and the reuse of what it predicts."""
        with torch.device("meta"):
            module = OPTDecoderLayer(self.config, layer)
        module.load_state_dict(tensors, assign=True)
        seen: dict[str, torch.Tensor] = {}

        def calibrate(_: Any, inputs: tuple[torch.Tensor, ...], z: torch.Tensor) -> torch.Tensor:
            x, z = (value.view(2, TO, -1) for value in (inputs[0], z))
            seen["bias"] = -quantile(z[0, FROM:], 1 - ACTIVE)
            seen["scores"] = (x[:, FROM - WINDOW :] @ a.T) @ b.T + seen["bias"]
            seen["z"] = z[1, FROM:] + seen["bias"]
            return (z + seen["bias"]).flatten(0, 1)

        module.fc1.register_forward_hook(calibrate)
        with torch.no_grad():
            self.hidden = module.eval()(self.hidden)
        tensors["fc1.bias"].fill_(float(seen["bias"]))
        edge = float(quantile(seen["scores"][0, WINDOW:], 1 - PREDICTED))
        measured = seen["scores"][1]
        quality = count(measured[WINDOW:], [edge], seen["z"])[0].as_dict()
        used = reuse(ids_of((measured > edge).numpy()), measured.shape[1], (WINDOW,))[0]
        return LayerPredictor(a.numpy(), b.numpy(), tensors["fc1.bias"].numpy(), edge), quality, used


def quantile(values: torch.Tensor, share: float) -> torch.Tensor:
    """The value that `share` of `values` lie below."""
    flat = values.flatten()
    return flat.kthvalue(max(1, round(share * flat.numel()))).values


class Shards:
    """Checkpoint files, one written at a time, and their index."""

    def __init__(self, out: Path, total: int):
        self.out, self.total, self.names, self.nbytes = out, total, {}, 0

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """The next shard."""
        file = f"model-{len(set(self.names.values())) + 1:05d}-of-{self.total:05d}.safetensors"
        save_file(tensors, self.out / file, metadata={"format": "pt"})
        self.names |= dict.fromkeys(tensors, file)
        self.nbytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self) -> None:
        """Write the index."""
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": self.names}
        (self.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def generate(out: Path, geometry: Geometry, seed: int = 0) -> Iterator[tuple[LayerPredictor, dict[str, float], Reuse]]:
    """Write the checkpoint, layer by layer; yields for each layer its predictor, quality and reuse."""
    if geometry.positions < TO:
        raise ValueError(f"positions={geometry.positions} are fewer than the {TO} that reuse is measured over")
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(geometry.config(), indent=1))
    config = OPTConfig.from_dict(geometry.config())
    config._attn_implementation = "sdpa"
    shards = Shards(out, geometry.layers + 1)
    tokens, positions = embeddings(geometry, seed)
    words = torch.randint(3, geometry.vocab, (2, TO), generator=torch.Generator().manual_seed(seed + 1))
    probe = Probe(config, tokens[words] + positions[POSITION_OFFSET : POSITION_OFFSET + TO])
    d, prefix = geometry.d_model, "model.decoder."
    shards.write(
        {
            f"{prefix}embed_tokens.weight": tokens,
            f"{prefix}embed_positions.weight": positions,
            f"{prefix}final_layer_norm.weight": torch.ones(d),
            f"{prefix}final_layer_norm.bias": torch.zeros(d),
        }
    )
    del tokens, positions
    for layer in range(geometry.layers):
        tensors, a, b = layer_weights(geometry, seed, layer)
        made = probe.pass_layer(layer, tensors, a, b)
        shards.write({f"{prefix}layers.{layer}.{name}": tensor for name, tensor in tensors.items()})
        yield made
    shards.finish()


def predictors_of(out: Path, layers: list[tuple[LayerPredictor, dict[str, float], Reuse]], seed: int) -> Predictors:
    """The factors as predictors of the finished checkpoint, with a card that says what they are."""
    with Checkpoint(out) as checkpoint:
        weights = Weights(checkpoint)
        digest = fingerprint(weights.read(weights.ffn(n)[0]) for n in range(len(layers)))
    first = layers[0][0]
    (d_ff, _), d_model = first.b.shape, first.a.shape[1]
    ffn = 2 * d_ff * d_model * len(layers)
    size = sum(p.a.size + p.b.size for p, _, _ in layers)
    origin = "factors of the generator"
    card = {
        "schema": SCHEMA,
        "origin": f"{origin} (benchmarks/opt_geometry.py): nothing was trained; thresholds are set so that about "
        f"{PREDICTED:.0%} of the neurons are predicted, {PREDICTED / ACTIVE:.1f} times those that fire",
        "model": {"name": out.name, "num_layers": len(layers), "d_model": d_model, "d_ff": d_ff},
        "spec": {"loss": "no", "init": origin, "learning_rate": 0.0, "validation_share": 1.0, "seed": seed},
        "data": {
            "train": {"source": f"none, {origin}", "documents": 0, "tokens": 0, "sha256": "none"},
            "calibrate": {"source": "random tokens", "tokens": TO - FROM},
            "test": {"source": "random tokens, another stream", "tokens": TO - FROM},
            "rounds": 0,
        },
        "seed": seed,
        "store_dtype": first.stored,
        "nbytes": sum(p.nbytes for p, _, _ in layers),
        "weight_share": size / ffn,
        "tokens_trained": 0,
        "steps": 0,
        "batch_tokens": 0,
        "loss_curve": {"step": [], "loss": []},
        "layers": [
            {
                "rank": p.rank,
                "threshold": p.threshold,
                **quality,
                "weight_share": (p.a.size + p.b.size) / (2 * d_ff * d_model),
                "new_share": used.new_share,
                "kept_share": used.kept_share,
                "frontier": [],
            }
            for p, quality, used in layers
        ],
    }
    return Predictors([p for p, _, _ in layers], card, digest)


def make(out: Path, geometry: Geometry, seed: int = 0, show: Any = sys.stderr) -> dict[str, float]:
    """Checkpoint at `out`, predictors at `out`-predictors; returns the mean shares over layers, as measured."""
    made = []
    for layer, (predictor, quality, used) in enumerate(generate(out, geometry, seed)):
        made.append((predictor, quality, used))
        print(
            f"layer {layer:2d}  active {quality['active'] / geometry.d_ff:.2%}  "
            f"predicted {quality['predicted'] / geometry.d_ff:.2%}  missed {quality['false_negative']:.2%}  "
            f"new {used.new_share:.2%}  kept {used.kept_share:.2%}  (k = {WINDOW})",
            file=show,
            flush=True,
        )
    predictors_of(out, made, seed).save(out.with_name(out.name + "-predictors"))
    return {
        "active_share": statistics.fmean(q["active"] / geometry.d_ff for _, q, _ in made),
        "predicted_share": statistics.fmean(q["predicted"] / geometry.d_ff for _, q, _ in made),
        "false_negative": statistics.fmean(q["false_negative"] for _, q, _ in made),
        "new_share": statistics.fmean(u.new_share for _, _, u in made),
        "kept_share": statistics.fmean(u.kept_share for _, _, u in made),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="checkpoint directory to write")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="opt-1.3b")
    parser.add_argument("--layers", type=int, help="only so many layers of it")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for path in (args.out, args.out.with_name(args.out.name + "-predictors")):
        if path.exists():
            print(f"{path}: already exists; choose another OUT or delete it", file=sys.stderr)
            return 1
    geometry = GEOMETRIES[args.geometry]
    if args.layers:
        geometry = replace(geometry, layers=args.layers)
    shares = make(args.out, geometry, args.seed)
    print(json.dumps({"benchmark": "opt_geometry", "geometry": args.geometry, "window": WINDOW, **shares}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
