"""How fast predictors of all layers train at a named model's geometry: random weights, random text, nothing to load.

The ceiling first: each token goes once through the dense model (2 operations a weight, and causal attention) and once
through the predictors, forward and back (4 operations a weight of a, 6 of b). Over the card's peak, that is the least
time a token can take. The trainer is the real one, with its groups, taps, optimiser, saved states and collectives;
only the text is drawn at random, so that no tokenizer is measured. Time counts after the warm-up steps.

    python benchmarks/predictor_training.py --geometry opt-6.7b --device cuda [--seconds 30] [--out record.json]
    torchrun --nproc-per-node 2 benchmarks/predictor_training.py --geometry opt-6.7b --device cuda
    python benchmarks/predictor_training.py --geometry tiny --seconds 1          # on the CPU, to see that it runs

The last line is one JSON object. `minutes`: the paper's 10,000 samples of 512 tokens, two epochs, at this rate, and
the statistics and first factors as they took here.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.models import family
from workbench.predictor.config import PredictorSpec
from workbench.predictor.taps import Taps
from workbench.predictor.train import MOST_MEMORY
from workbench.predictor.trainer import Trainer, choose_micro_windows
from workbench.spec import ModelSpec
from workbench.training.distributed import World, connect
from workbench.training.interrupts import Interrupts
from workbench.training.memory import free_bytes
from workbench.training.state import StateWriter

SAMPLES, LENGTH, EPOCHS = 10_000, 512, 2
GEOMETRIES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512},
    "opt-125m": {"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "opt-1.3b": {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
    "opt-6.7b": {"hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32, "num_attention_heads": 32},
    "opt-13b": {"hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40, "num_attention_heads": 40},
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "hidden_act": "relu",
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
}  # fmt: skip


class RandomWindows:
    """Token windows int64 [length] drawn at random, the same on every process."""

    def __init__(self, vocab: int, length: int) -> None:
        self.source, self.round, self.vocab, self.length = "random tokens", 0, vocab, length
        self._rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        return self._rng.integers(3, self.vocab, self.length)

    def position(self) -> dict[str, Any]:
        """Nothing to come back to."""
        return {}

    def seek(self, position: dict[str, Any]) -> None:
        """Random text is as good anywhere."""


def build(name: str, dtype: str, device: torch.device) -> tuple[Any, ModelSpec]:
    """The model with random weights on its device, and its geometry. An OPT's up biases leave some 5% active."""
    from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    fields = dict(GEOMETRIES[name])
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with device:
            if fields.pop("model_type", "opt") == "llama":
                model: Any = LlamaForCausalLM(LlamaConfig(**fields))
            else:
                fields["word_embed_proj_dim"] = fields["hidden_size"]
                model = OPTForCausalLM(OPTConfig(**fields))
                for layer in model.model.decoder.layers:
                    layer.fc1.bias.data.fill_(-1.65 * 0.02 * fields["hidden_size"] ** 0.5)
    finally:
        torch.set_default_dtype(before)
    geometry = family(model.config.model_type).spec(model.config.to_dict())
    return model.eval().requires_grad_(False), geometry


class Clock:
    """A progress function that times the steps after a warm-up and then asks for a stop."""

    def __init__(self, interrupts: Interrupts, device: torch.device, batch_tokens: int, warmup: int, seconds: float):
        self.interrupts, self.device, self.batch_tokens = interrupts, device, batch_tokens
        self.warmup, self.seconds = warmup, seconds
        self.began = self.elapsed = 0.0
        self.steps = self.counted = 0

    def now(self) -> float:
        """Once all queued work is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != "train":
            return
        self.steps += 1
        if self.steps == self.warmup:
            self.began = self.now()
        elif self.steps > self.warmup and time.perf_counter() - self.began >= self.seconds:
            self.elapsed, self.counted = self.now() - self.began, self.steps - self.warmup
            self.interrupts.pending = True


def operations(geometry: ModelSpec, weights: int, ranks: list[int], sequence: int) -> dict[str, float]:
    """Floating-point operations a token: of the dense model's decoder layers, and of the predictors."""
    d_model, d_ff, layers = geometry.d_model, geometry.d_ff, geometry.num_layers
    return {
        "dense": 2.0 * weights + 2.0 * sequence * d_model * layers,
        "predictors": float(sum(rank * (4 * d_model + 6 * d_ff) for rank in ranks)),
    }


def layer_weights(model: Any) -> int:
    """Weights of the matrices inside decoder layers."""
    named = model.base_model.named_parameters()
    return sum(p.numel() for name, p in named if p.ndim == 2 and "layers." in name)


def profile(trainer: Trainer, steps: int) -> None:
    """Which kernels take the time of a few steps, to stderr."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    cuda = trainer.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with Taps(trainer.model, trainer.ups, trainer.view, trainer._sink), profiler(activities=kinds) as found:
        for _ in range(steps):
            trainer.one_step()
        if cuda:
            torch.cuda.synchronize(trainer.device)
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=25), file=sys.stderr)


def measure(args: argparse.Namespace, world: World) -> dict[str, Any]:
    """Build, initialise, train for a while."""
    model, geometry = build(args.geometry, args.dtype, world.device)
    rate = {"rank": args.rank, "last_rank": args.last_rank, "last_layers": args.last_layers}
    spec = PredictorSpec(
        **rate, tokens=SAMPLES * LENGTH * EPOCHS, sequence=args.sequence, batch_tokens=args.batch_tokens,
        store_dtype="int8", allocation=args.allocation,
    ).resolved(geometry)  # fmt: skip
    ups = family(geometry.model_type).activated_linears(model)
    free = min(world.gather(free_bytes(world.device)))
    memory = int(args.memory_gib * 2**30) if args.memory_gib else min(MOST_MEMORY[world.device.type], free // 3)
    micro = choose_micro_windows(spec, geometry, memory, world.size)
    interrupts = Interrupts()
    stream = RandomWindows(geometry.vocab_size, spec.sequence)
    clock = Clock(interrupts, world.device, (spec.batch_tokens or 0), args.warmup, args.seconds)
    compute = torch.bfloat16 if args.dtype == "bfloat16" and world.device.type == "cuda" else torch.float32
    fused = args.fused if args.fused is not None else world.device.type == "cuda"
    began = clock.now()
    trainer = Trainer(
        model, ups, stream, spec, geometry, micro_windows=micro, compute=compute,
        progress=clock if world.main else lambda stage, done, total: None,
        interrupts=interrupts, world=world, fused=fused,
    )  # fmt: skip
    trainer.initialise()
    statistics = clock.now() - began
    if args.profile:
        profile(trainer, 2)  # compiles and warms up
        profile(trainer, args.profile)
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer.run(StateWriter(Path(folder)), args.checkpoint_seconds)
        except KeyboardInterrupt:
            if not clock.counted and world.main:
                raise  # not the clock's
        done = world.share((clock.elapsed, clock.counted))
    elapsed, counted = done
    if not counted:
        raise SystemExit("no step was timed: the training ended first; give fewer --seconds or --warmup")
    tokens = counted * trainer.batch_tokens
    flop = operations(geometry, layer_weights(model), trainer.ranks, spec.sequence)
    speed, total = tokens / elapsed, sum(flop.values())
    factors = sum(trainer.ranks) * (geometry.d_model + geometry.d_ff) + geometry.num_layers * geometry.d_ff
    cuda = world.device.type == "cuda"
    return {
        "benchmark": "predictor_training",
        "geometry": args.geometry,
        "device": torch.cuda.get_device_name(world.device) if cuda else platform.processor() or platform.machine(),
        "world_size": world.size,
        "torch": torch.__version__,
        "dtype": args.dtype,
        "compute": str(compute).removeprefix("torch."),
        "fused": fused,
        "sequence": spec.sequence,
        "batch_tokens": trainer.batch_tokens,
        "micro_tokens": micro * spec.sequence,
        "ranks": {str(rank): trainer.ranks.count(rank) for rank in sorted(set(trainer.ranks))},
        "predictor_share": factors / (geometry.num_layers * geometry.parts * geometry.d_ff * geometry.d_model),
        "statistics_s": statistics,
        "timed_s": elapsed,
        "timed_tokens": tokens,
        "tokens_per_s": speed,
        "minutes": (SAMPLES * LENGTH * EPOCHS / speed + statistics) / 60,
        "gflop_per_token": {name: value / 1e9 for name, value in flop.items()},
        "tflop_per_s": speed * total / 1e12 / world.size,
        "peak_share": speed * total / world.size / args.peak if cuda else None,
        "peak_flop_per_s": args.peak if cuda else None,
        "peak_device_bytes": torch.cuda.max_memory_allocated(world.device) if cuda else None,
        "loss": [float(np.mean(row)) for row in (trainer.curve["loss"][0], trainer.curve["loss"][-1])],
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="opt-6.7b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the dense model [bfloat16 on CUDA]")
    parser.add_argument("--seconds", type=float, default=30.0, help="of steps that count")
    parser.add_argument("--warmup", type=int, default=5, help="steps before")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="a step, of all processes together")
    parser.add_argument("--sequence", type=int, default=LENGTH)
    parser.add_argument("--rank", type=int, default=None, help="[the paper's, by the model's size]")
    parser.add_argument("--last-rank", type=int, default=None)
    parser.add_argument("--last-layers", type=int, default=None)
    parser.add_argument("--allocation", choices=("groups", "measured"), default="groups")
    parser.add_argument("--memory-gib", type=float, default=None, help="for captured activations")
    parser.add_argument("--checkpoint-seconds", type=float, default=120.0)
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=None, help="[on CUDA]")
    parser.add_argument("--peak", type=float, default=989e12, help="the card's bfloat16 operations a second")
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS", help="print where their time goes")
    parser.add_argument("--out", type=Path, default=None, help="write the record here as well")
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    with connect(args.device) as world:
        record = measure(args, world)
        if world.main:
            text = json.dumps(record)
            if args.out:
                args.out.write_text(text + "\n")
            print(text, flush=True)


if __name__ == "__main__":
    main()
