"""A dense Hugging Face model and taps on its feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.models import code_of_its_own, family
from workbench.models.build import set_thresholds, transformers_config
from workbench.models.checkpoint import Checkpoint
from workbench.models.hub import locate
from workbench.models.weights import Weights
from workbench.spec import ModelSpec

Sink = Callable[[int, torch.Tensor, torch.Tensor], None]


def dense(
    model: str | Path,
    dtype: str = "float32",
    device: str = "cpu",
    *,
    force: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """The whole model in memory, in evaluation mode, as transformers' own class with sdpa attention.

    FATReLU, which transformers does not have, is put in; `config` names it, with its thresholds, as the checkpoint
    does. `force` allows an activation that is not ReLU. An architecture that `workbench.models` has is loaded without
    any code that its checkpoint brings along. `trust_remote_code` runs the code of one that it does not have; such a
    model can only be run whole.

    Raises CheckpointError when the architecture or activation is not supported, or when a weight is missing, extra or
    misshapen: transformers alone would fill such weights with random numbers.
    """
    path, name = locate(model, trust_remote_code)
    with Checkpoint(path, name) as checkpoint:
        if not code_of_its_own(checkpoint.config):
            spec = Weights(checkpoint, force).spec
        elif trust_remote_code:
            spec = None
        else:
            raise CheckpointError(
                f"{name}: model_type {checkpoint.config['model_type']!r} has code of its own (auto_map); "
                f"pass --trust-remote-code to run it"
            )
    loaded = _load_foreign(path, name, dtype) if spec is None else _load(path, name, spec, dtype)
    return loaded.to(device).eval().requires_grad_(False)


def _load(path: Path, name: str, spec: ModelSpec, dtype: str) -> Any:
    module = family(spec.model_type)
    model_class = module.model_class()
    config = transformers_config(spec, model_class, module.ACTIVATION_FIELD)
    options = {"config": config, "attn_implementation": "sdpa", "dtype": getattr(torch, dtype)}
    loaded = _from_pretrained(model_class, path, name, module.tied(spec), **options)
    set_thresholds(spec, loaded, module.ACTIVATION_FIELD, module.set_activation)
    return loaded


def _load_foreign(path: Path, name: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    return _from_pretrained(AutoModelForCausalLM, path, name, (), dtype=getattr(torch, dtype), trust_remote_code=True)


def _from_pretrained(model_class: Any, path: Path, name: str, tied: Container[str], **options: Any) -> Any:
    try:
        with _no_loading_bar():
            loaded, info = model_class.from_pretrained(str(path), output_loading_info=True, **options)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, safetensors' own and more
        raise CheckpointError(f"{name}: cannot be loaded as a model ({_first_line(error)}); see config.json") from error
    if missing := sorted(key for key in info["missing_keys"] if key not in tied):
        raise CheckpointError(f"{name}: tensor {missing[0]} is missing; download the checkpoint again")
    return loaded


def tokenizer(model: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The checkpoint's tokenizer. CheckpointError when it has none.

    `trust_remote_code` runs the code of a tokenizer that comes with its own.
    """
    from transformers import AutoTokenizer

    path, name = locate(model, trust_remote_code)
    if not path.is_dir():  # transformers would look for it on the hub, with retries
        raise CheckpointError(f"{name}: no such directory; give a checkpoint directory or a hub id (org/name)")
    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except Exception as error:  # as above
        raise CheckpointError(f"{name}: no usable tokenizer ({_first_line(error)}); add tokenizer.json") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _no_loading_bar():  # type: ignore[no-untyped-def]
    """Transformers' own bar would be drawn through the caller's."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class FfnTap:
    """Hands over, at each forward, every layer's FFN input and pre-activations.

    `activated_linears`: the FFN's first linear of each layer (the gate's, in a gated FFN, where the activation sits on
    the gate). Without a sink, the last forward's tensors are kept in `inputs` and `pre` (one a layer: x [tokens,
    d_model] after the norm, z [tokens, d_ff] before the ReLU). With a sink, `sink(layer, x, z)` is called while the
    model runs and nothing is kept. `thresholds`, one a layer (`ModelSpec.thresholds`; none or empty for 0), are taken
    from z, so that z > 0 says everywhere that a neuron is active. Use as a context manager.
    """

    def __init__(
        self,
        activated_linears: Sequence[nn.Linear],
        sink: Sink | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        self.activated_linears = list(activated_linears)
        self.thresholds = tuple(thresholds or ())
        if self.thresholds and len(self.thresholds) != len(self.activated_linears):
            raise ValueError(f"{len(self.thresholds)} thresholds for {len(self.activated_linears)} layers")
        self.inputs: list[torch.Tensor] = [torch.empty(0)] * len(self.activated_linears)
        self.pre: list[torch.Tensor] = [torch.empty(0)] * len(self.activated_linears)
        self._sink = sink or self._keep
        self._handles: list[Any] = []

    def _keep(self, layer: int, x: torch.Tensor, z: torch.Tensor) -> None:
        self.inputs[layer], self.pre[layer] = x, z

    def _hook(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            z = output.reshape(-1, output.shape[-1])
            if self.thresholds:
                # rounded to z's dtype, as FatReLU does: z - t > 0 exactly where z > t
                z = z - torch.full((), self.thresholds[layer], dtype=z.dtype, device=z.device)
            self._sink(layer, args[0].reshape(-1, args[0].shape[-1]), z)

        return hook

    def __enter__(self) -> FfnTap:
        self._handles = [m.register_forward_hook(self._hook(i)) for i, m in enumerate(self.activated_linears)]
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def run_trunk(model: Any, ids: np.ndarray) -> None:
    """One forward of token ids int64 [batch, length] without the output head; the taps take what they need."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        model.base_model(input_ids=torch.from_numpy(ids).to(device), use_cache=False)


def active_neurons(
    model: Any,
    activated_linears: Sequence[nn.Linear],
    windows: Iterable[np.ndarray],
    thresholds: Sequence[float] | None = None,
) -> list[list[np.ndarray]]:
    """Which neurons fire: for each layer, for each token of the windows in order, sorted int32 ids.

    `thresholds`: those of FfnTap.
    """
    found: list[list[np.ndarray]] = [[] for _ in activated_linears]

    def sink(layer: int, x: torch.Tensor, z: torch.Tensor) -> None:
        mask = (z > 0).cpu().numpy()
        tokens, neurons = np.nonzero(mask)
        counts = np.bincount(tokens, minlength=mask.shape[0])
        found[layer].extend(np.split(neurons.astype(np.int32), np.cumsum(counts)[:-1]))

    with FfnTap(activated_linears, sink, thresholds):
        for window in windows:
            run_trunk(model, window[None, :])
    return found
