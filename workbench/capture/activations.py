"""A dense Hugging Face model and taps on its feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.models.checkpoint import Checkpoint
from workbench.models.hub import locate
from workbench.models.weights import Weights

Sink = Callable[[int, torch.Tensor, torch.Tensor], None]


def dense(model: str | Path, dtype: str = "float32", device: str = "cpu") -> Any:
    """The whole model in memory, in evaluation mode, as transformers' own class.

    Raises CheckpointError when the architecture or activation is not supported, or when a weight is missing, extra or
    misshapen: transformers alone would fill such weights with random numbers.
    """
    from transformers import AutoModelForCausalLM

    path, name = locate(model)
    with Checkpoint(path, name) as checkpoint:
        Weights(checkpoint)
    try:
        with _no_loading_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=getattr(torch, dtype))
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, safetensors' own and more
        raise CheckpointError(f"{name}: cannot be loaded as a model ({_first_line(error)}); see config.json") from error
    return loaded.to(device).eval().requires_grad_(False)


def tokenizer(model: str | Path) -> Any:
    """The checkpoint's tokenizer. CheckpointError when it has none."""
    from transformers import AutoTokenizer

    path, name = locate(model)
    try:
        return AutoTokenizer.from_pretrained(str(path))
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
    model runs and nothing is kept. Use as a context manager.
    """

    def __init__(self, activated_linears: Sequence[nn.Linear], sink: Sink | None = None) -> None:
        self.activated_linears = list(activated_linears)
        self.inputs: list[torch.Tensor] = [torch.empty(0)] * len(self.activated_linears)
        self.pre: list[torch.Tensor] = [torch.empty(0)] * len(self.activated_linears)
        self._sink = sink or self._keep
        self._handles: list[Any] = []

    def _keep(self, layer: int, x: torch.Tensor, z: torch.Tensor) -> None:
        self.inputs[layer], self.pre[layer] = x, z

    def _hook(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            self._sink(layer, args[0].reshape(-1, args[0].shape[-1]), output.reshape(-1, output.shape[-1]))

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
    model: Any, activated_linears: Sequence[nn.Linear], windows: Iterable[np.ndarray]
) -> list[list[np.ndarray]]:
    """Which neurons fire: for each layer, for each token of the windows in order, sorted int32 ids."""
    found: list[list[np.ndarray]] = [[] for _ in activated_linears]

    def sink(layer: int, x: torch.Tensor, z: torch.Tensor) -> None:
        mask = (z > 0).cpu().numpy()
        tokens, neurons = np.nonzero(mask)
        counts = np.bincount(tokens, minlength=mask.shape[0])
        found[layer].extend(np.split(neurons.astype(np.int32), np.cumsum(counts)[:-1]))

    with FfnTap(activated_linears, sink):
        for window in windows:
            run_trunk(model, window[None, :])
    return found
