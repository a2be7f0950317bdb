"""The engines `mlx-metal`, `mlx-cuda` and `mlx-cpu`: one decoder in MLX around FFNs that run from flash."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import torch

from workbench.ablation import Ablation
from workbench.engines.budget import DramPlan
from workbench.engines.ffn import FlashFFN, Shared
from workbench.engines.mlx import linear
from workbench.engines.mlx.decoder import build
from workbench.engines.mlx.device import check_memory, gpu_info, machine, stream
from workbench.engines.mlx.ffn import CpuFFN, Gpu, GpuFFN, GpuPredictor
from workbench.engines.mlx.weights import ResidentWeights, shared_bytes
from workbench.engines.pipeline import FlashEngine
from workbench.engines.prompt import WAYS
from workbench.engines.setting import Setting
from workbench.errors import AblationError
from workbench.flash.store import Store
from workbench.kernels.metal.kernel import Machine
from workbench.kernels.metal.mlx_machine import mlx_core
from workbench.predictor.low_rank import LayerPredictor, Predictors
from workbench.spec import RunSpec

MACHINES = ("mlx-metal", "mlx-cuda")


class MlxEngine(FlashEngine):
    """Runs a store in MLX. On Metal, flash is read straight into the memory that the GPU computes on; on CUDA records
    are copied to the card, which counts as mem; on the CPU the FFN's kernels are those of torch-cpu.

    kernels: what runs the Metal bodies; by default the GPU of the backend. Its `compilations` do not grow with the
    tokens.
    """

    def __init__(
        self,
        store: Store,
        ablation: Ablation,
        predictors: Predictors | None,
        run: RunSpec,
        backend: str,
        kernels: Machine | None = None,
    ):
        self.backend = backend
        self.gpu: Gpu | None = None
        if backend in MACHINES:
            self.gpu = Gpu(kernels or machine(backend), in_place=backend == "mlx-metal", lazy=kernels is None)
        else:
            self.prompt_ways = WAYS
        self._emulated = kernels is not None
        with self._stream():
            super().__init__(store, ablation, predictors, run)

    def _stream(self) -> Any:
        return stream("mlx-cpu" if self._on_cpu else self.backend)

    def _wait(self) -> Any:
        """What a wait for the GPU is timed in; on the CPU there is nobody to wait for."""
        return self.clock.wait() if self.gpu is not None else contextlib.nullcontext()

    @property
    def _on_cpu(self) -> bool:
        return self.gpu is None or getattr(self, "_emulated", False)

    def check(self, setting: Setting) -> DramPlan:
        if setting.ablation.prefetch:
            raise AblationError(
                f"ablation: prefetch=True is not there with backend {self.backend}; set prefetch=False or use torch-cpu"
            )
        plan = super().check(setting)
        if not self._on_cpu:
            check_memory(plan.total, str(self.store.path), gpu_info())
        return plan

    def settle(self) -> None:
        with self._stream():
            super().settle()

    def close(self) -> None:
        super().close()
        mlx_core().clear_cache()  # what MLX keeps for the next array
        if self.gpu is not None:
            self.gpu.scratch = self.gpu.scratch_view = None
            self.gpu.active = []

    # what the pipeline asks for

    def _begin(self) -> None:
        in_place = self.gpu is None or self.gpu.in_place
        self.weights = ResidentWeights(self.store, self.clock, in_place)
        dtype = self.store.dtype
        if self.gpu is not None:
            # The GPU's half-precision shortcut for float32 products (prompts) loses more than the tests allow.
            os.environ.setdefault("MLX_ENABLE_TF32", "0")
            product = linear.on_gpu(self.gpu.machine, dtype)
        else:
            product = linear.on_cpu(dtype, lambda: self.shared.threads)
        self.model = build(self.spec, self.weights.arrays, product, compiled=not self._on_cpu)

    def _new_ffn(self, shared: Shared, layer: int) -> FlashFFN:
        biases = self._biases(layer)
        return CpuFFN(shared, layer, biases) if self.gpu is None else GpuFFN(shared, layer, biases, self.gpu)

    def _new_cache(self, capacity: int) -> Any:
        return self.model.new_cache(capacity, self.run.kv_dtype)

    def _cache_layers(self) -> Any:
        return self.cache or ()

    def _bias(self, name: str) -> np.ndarray[Any, Any] | None:
        import mlx.core as mx

        stored = self.weights.arrays.get(name)
        return None if stored is None else np.array(stored.astype(mx.float32))

    def _buffer(self, nbytes: int) -> np.ndarray[Any, Any]:
        if self.gpu is None:
            return super()._buffer(nbytes)
        self.gpu.scratch = self.gpu.scratch_view = None
        self.gpu.scratch, held = shared_bytes(nbytes)
        if self.gpu.in_place:
            return held
        self.gpu.scratch_view = held
        return super()._buffer(nbytes)

    def _pack(self, layer: LayerPredictor) -> Any:
        return super()._pack(layer) if self.gpu is None else GpuPredictor(layer, self.gpu)

    def _logits(self, ids: list[int], keep: int) -> torch.Tensor:
        import mlx.core as mx

        with self._stream():
            logits = self._lazy_logits(ids, keep)
            active = [] if self.gpu is None else self.gpu.active
            with self._wait():
                mx.eval(logits, active)
            self.clock.active += sum(int(np.array(count)[0]) for count in active)
            active.clear()
            return torch.from_numpy(np.array(logits))

    def _lazy_logits(self, ids: list[int], keep: int) -> Any:
        import mlx.core as mx

        streamed = not self.shared.ablation.hybrid
        assert self.reader is not None
        if self.gpu is not None:
            self.gpu.active.clear()
        if streamed:
            self.weights.load(self.reader, "embed")
            self.weights.load(self.reader, "head")
        h = self.model.embed(mx.array(ids), self.position)
        for layer, ffn in enumerate(self.ffns):
            if streamed:
                with self._wait():
                    mx.eval(h)  # all that was computed from the layer whose weights are overwritten now
                self.weights.load(self.reader, f"layer.{layer}")
            h, x = self.model.attend(layer, h, self.cache[layer], self.position)
            assert isinstance(ffn, CpuFFN | GpuFFN)
            h = self.model.join(layer, h, ffn.run(x))
        return self.model.head(h[-keep:])
