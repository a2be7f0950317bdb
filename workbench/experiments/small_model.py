"""What a layer costs beside its bytes: a small model of the same family, random, run through the pipeline whole."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.ablation import PAPER_ROWS, Ablation, IoEngine
from workbench.engines.budget import plan_dram
from workbench.engines.layers import TORCH_DTYPES
from workbench.engines.torch_cpu import TorchCpuEngine
from workbench.errors import StoreError
from workbench.experiments.cost import Mode
from workbench.experiments.plan_inputs import Outline
from workbench.experiments.workload import Arena, Workload, typical
from workbench.flash.convert import write_store
from workbench.flash.reader import FlashReader, aligned_buffer
from workbench.flash.store import Store
from workbench.models import family
from workbench.predictor.fingerprint import fingerprint
from workbench.predictor.low_rank import LayerPredictor, Predictors
from workbench.spec import ModelSpec, RunSpec

SMALL_LAYERS = (2, 6)
SMALL_WIDTH, HEAD_WIDTH, SMALL_FFN, SMALL_VOCAB, SMALL_POSITIONS = 512, 64, 2048, 512, 40
"""The small model: as wide as the model itself, at most so wide. Its matrices push what Python needs out of the
caches, as real ones do; with smaller ones a layer would seem cheaper than it is."""
PROMPT, WARM_UP = 8, 4
NO_COST_BYTES_PER_S = 1e13
MODES: dict[Mode, Ablation] = {
    "streamed": PAPER_ROWS["naive"],
    "dense": PAPER_ROWS["hybrid"],
    "sparse": PAPER_ROWS["+ bundling (all)"],
}


def random_predictor(rank: int, d_model: int, d_ff: int, stored: str, rng: np.random.Generator) -> LayerPredictor:
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((rank, d_model), (d_ff, rank)))
    scales: list[np.ndarray[Any, Any] | None] = [None, None]
    if stored == "int8":
        scales = [np.full(len(each), 0.03, np.float32) for each in (a, b)]
        a, b = (np.clip(np.round(each / 0.03), -127, 127).astype(np.int8) for each in (a, b))
    else:
        a, b = a.astype(stored), b.astype(stored)
    # A tenth of the neurons: the score's deviation is about that of a product of two normal vectors of the rank.
    threshold = 1.28 * float(np.sqrt(rank * d_model))
    return LayerPredictor(a, b, np.zeros(d_ff, np.float32), threshold, stored, *scales)


class SmallWeights:
    """Random weights of a small model, as a conversion takes them."""

    def __init__(self, spec: ModelSpec, dtype: str, seed: int) -> None:
        self.spec, self.dtype = spec, dtype
        self._family = family(spec.model_type)
        self._shapes = self._family.tensor_shapes(spec)
        matrices = {name for layer in range(spec.num_layers) for name in self.ffn(layer)}
        order = ["embed", *(f"layer.{i}" for i in range(spec.num_layers)), "head"]
        grouped: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in order}
        for name, shape in self._shapes.items():
            if name not in matrices:
                grouped[self._family.group_of(name)][name] = shape
        self.groups = list(grouped.items())
        generator = torch.Generator().manual_seed(seed)
        self._values = {
            name: _drawn(name, shape, generator).to(TORCH_DTYPES[dtype]) for name, shape in self._shapes.items()
        }

    def ffn(self, layer: int) -> tuple[str, ...]:
        return self._family.ffn_names(self.spec, layer).matrices

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._values[name][start:stop]

    def where(self, name: str) -> str:
        return "the small model"

    def source(self) -> dict[str, Any]:
        return {"name": "small", "dtype": self.dtype, "digest": "0" * 64}

    def modified(self) -> dict[str, int]:
        return {}

    def tokenizer_files(self) -> list[Path]:
        return []


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return drawn / shape[-1] ** 0.5
    return 0.1 * drawn + (0.0 if name.endswith("bias") else 1.0)


def small_spec(spec: ModelSpec, layers: int) -> ModelSpec:
    """A model of the same family and switches with few layers, narrower where the model is wide."""
    module = family(spec.model_type)
    width = max(HEAD_WIDTH, min(SMALL_WIDTH, spec.d_model) // HEAD_WIDTH * HEAD_WIDTH)
    heads = width // HEAD_WIDTH
    config: dict[str, Any] = {**spec.config, "num_hidden_layers": layers, "ffn_hidden_size": SMALL_FFN}
    sizes = {
        "hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": SMALL_FFN, "intermediate_size": SMALL_FFN,
        "num_attention_heads": heads, "head_dim": HEAD_WIDTH, "vocab_size": SMALL_VOCAB,
        "max_position_embeddings": SMALL_POSITIONS, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    for name in ("num_key_value_heads", "num_kv_heads"):
        sizes[name] = heads if spec.config.get(name) == spec.config["num_attention_heads"] else 1
    config |= {name: value for name, value in sizes.items() if name in config}
    config.pop("rope_scaling", None)
    if spec.activation not in ("relu", "relu2") or spec.thresholds:
        config[module.ACTIVATION_FIELD] = "relu"
    return module.spec(config)


def small_predictors(store: Store, rng: np.random.Generator) -> Predictors:
    spec = store.spec
    layers = [random_predictor(8, spec.d_model, spec.d_ff, "float16", rng) for _ in range(spec.num_layers)]
    digest = fingerprint(store.activated_rows(i) for i in range(spec.num_layers))
    return Predictors(layers, {"layers": [{"predicted": spec.d_ff / 8} for _ in layers]}, digest)


def framework(
    work: Workload, arena: Arena, folder: Path, engine: IoEngine, threads: int, rates: Mapping[str, float],
    rng: np.random.Generator,
) -> dict[str, Any]:  # fmt: skip
    """Seconds of a layer and of all else beside their bytes: what small models of two depths take in the pipeline,
    flash included, less their weights at `rates`; and what the requests and the copies of reads take. By the names of
    ComputeFit. All models take their tokens in turn, so that what drifts on the machine is the same for all.
    StoreError when there is no room under `folder`."""
    running: dict[tuple[Mode, int], _Running] = {}
    with _directory(folder) as inside, ExitStack() as opened:
        for layers in SMALL_LAYERS:
            spec = small_spec(work.spec, layers)
            store = write_store(SmallWeights(spec, work.dtype, layers), inside / str(layers))
            predictors = small_predictors(store, rng)
            for mode, row in MODES.items():
                run = _small_run(store, row, predictors, threads)
                row = dataclasses.replace(row, io=engine)
                model = opened.enter_context(TorchCpuEngine(store, row, predictors, run))
                running[mode, layers] = _Running(model, work, arena, threads, rates)
        ids = rng.integers(2, SMALL_VOCAB, SMALL_POSITIONS).tolist()
        for each in running.values():
            each.engine.prefill(ids[:PROMPT])
        for token in ids[PROMPT:]:
            for each in running.values():
                each.step(token)
        few, many = SMALL_LAYERS
        extra = _requests(running["sparse", many].engine, arena, threads)
        extra["copy_bytes_per_s"] = _copy_rate(running["sparse", many].engine.store, engine)
    taken = {key: statistics.median(each.compute[WARM_UP:]) for key, each in running.items()}
    layer = {mode: max(0.0, (taken[mode, many] - taken[mode, few]) / (many - few)) for mode in MODES}
    return {
        "base_s": statistics.mean(max(0.0, taken[mode, few] - few * layer[mode]) for mode in MODES),
        "layer_s": layer,
        "predictor_call_s": statistics.median(running["sparse", many].predictor[WARM_UP:]) / many,
        **extra,
    }


class _Running:
    """A small model that takes tokens. `compute` and `predictor`: seconds of each token beside its bytes at `rates`,
    without the predictors, and of them alone.

    Before each layer memory is read as a layer of the model would, since few small layers would stay in the caches;
    that is not counted.
    """

    def __init__(
        self, engine: TorchCpuEngine, work: Workload, arena: Arena, threads: int, rates: Mapping[str, float]
    ) -> None:
        self.engine, self.arena, self.threads, self.rates = engine, arena, threads, rates
        self.compute: list[float] = []
        self.predictor: list[float] = []
        self._disturbed = 0.0
        store, predictors = engine.store, engine.predictors
        self._linear_bytes = Outline.of("small", store.path, store.spec, work.dtype).linear_bytes
        factors = sum(layer.a.nbytes + layer.b.nbytes for layer in predictors.layers) if predictors else 0
        self._factors_s = factors / rates["predictor"]
        self._ffn_rate = rates["dense FFN" if engine.ablation.predictor == "off" else "sparse FFN"]
        for index in range(store.spec.num_layers):
            engine._layer(index).register_forward_pre_hook(self._disturb, prepend=True)

    def _disturb(self, *_: object) -> None:
        began = time.perf_counter()
        self.arena.disturb(self.threads)
        self._disturbed += time.perf_counter() - began

    def step(self, token: int) -> None:
        """Take one token."""
        self._disturbed = 0.0
        stats, store = self.engine.step(token)[1], self.engine.store
        neurons = stats.predicted + stats.active * (store.spec.parts - 1)
        weights = self._linear_bytes / self.rates["linear layers"] + store.layout.row_bytes * neurons / self._ffn_rate
        self.compute.append((stats.compute_ms - stats.predictor_ms) / 1000 - self._disturbed - weights)
        self.predictor.append(max(0.0, stats.predictor_ms / 1000 - self._factors_s))


@contextmanager
def _directory(folder: Path) -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(prefix=".workbench-small-", dir=folder)
    except OSError as error:
        raise StoreError(
            f"{folder}: a small store cannot be written there ({error.strerror}); give another --store-dir"
        ) from error
    with made as inside:
        yield Path(inside)


def _small_run(store: Store, row: Ablation, predictors: Predictors, threads: int) -> RunSpec:
    """Room for what must be there and for half of the FFN, so that in every mode some of it is read."""
    run = RunSpec(dram="1GiB", context=SMALL_POSITIONS, compute_threads=threads)
    fixed = plan_dram(store, row, predictors, run).fixed
    return dataclasses.replace(run, dram=f"{fixed + store.spec.ffn_bytes(store.dtype) // 2}B")


def _copy_rate(store: Store, engine: IoEngine) -> float:
    """Bytes/s of what the reader copies into place, beyond the same bytes read in place; in turn, as flash drifts."""
    layout, neurons = store.layout, store.spec.d_ff
    nbytes = neurons * layout.row_stride // 4096 * 4096
    rows = np.arange(nbytes // layout.row_stride, dtype=np.int64)
    width = 2 * layout.row_stride + 64
    target = aligned_buffer(max(nbytes, len(rows) * width))
    lengths = np.full(len(rows), layout.row_bytes)
    times: dict[bool, list[float]] = {False: [], True: []}
    with FlashReader(engine, 32) as reader:
        handle = reader.open(store.split_path)
        for turn in range(32):
            at = store.split_offset(turn // 2 % store.spec.num_layers, 0)
            began = time.perf_counter()
            if turn % 2:
                reader.read(handle, at + rows * layout.row_stride, lengths, target, rows * width, 0)
            else:
                reader.read(handle, [at], [nbytes], target, [0], 0)
            times[bool(turn % 2)].append(time.perf_counter() - began)
    extra = statistics.median(times[True]) - statistics.median(times[False])
    return len(rows) * layout.row_bytes / extra if extra > 0 else NO_COST_BYTES_PER_S


def _requests(engine: TorchCpuEngine, arena: Arena, threads: int) -> dict[str, float]:
    """Seconds of making the requests of one call, and of each neuron of it."""
    ffn, found = engine.ffns[0], []
    for neurons in (16, SMALL_FFN):
        ids = np.arange(neurons, dtype=np.int32)
        times = []
        for _ in range(15):
            arena.disturb(threads)
            began = time.perf_counter()
            ffn._requests(ids, ids)
            times.append(time.perf_counter() - began)
        found.append(typical(times))
    each = max(0.0, (found[1] - found[0]) / (SMALL_FFN - 16))
    return {"fetch_call_s": max(0.0, found[0] - 16 * each), "fetch_neuron_s": each}
