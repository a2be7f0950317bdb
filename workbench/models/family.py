"""What the rest of the workbench asks of an architecture: one module of `workbench.models` for each model_type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from workbench.spec import ModelSpec


@dataclass(frozen=True)
class FfnNames:
    """Names of one layer's FFN tensors. `up` and `gate` are [d_ff, d_model], `down` is [d_model, d_ff].

    Without a gate the activation sits on `up`; with one it sits on `gate`, and the result is multiplied by `up`.
    """

    up: str
    up_bias: str | None
    down: str
    down_bias: str | None
    gate: str | None = None
    gate_bias: str | None = None

    @property
    def matrices(self) -> tuple[str, ...]:
        """The FFN matrices by part index: up, down, (gate)."""
        return (self.up, self.down) if self.gate is None else (self.up, self.down, self.gate)


class Family(Protocol):
    """An architecture. Names are those of transformers' own state dict."""

    @property
    def MODEL_TYPE(self) -> str:
        """`model_type` in config.json."""
        ...

    @property
    def ALIASES(self) -> tuple[str, ...]:
        """Other values of `model_type` that checkpoints of this architecture have."""
        ...

    @property
    def ACTIVATION_FIELD(self) -> str:
        """The field of config.json that names the FFN's activation."""
        ...

    def model_class(self) -> Any:
        """transformers' class for text generation; imports transformers."""
        ...

    def spec(self, config: dict[str, Any], force: bool = False) -> ModelSpec:
        """The geometry that config.json states. CheckpointError when it cannot be run; `force` allows non-ReLU."""
        ...

    def canonical(self, name: str) -> str | None:
        """A checkpoint's tensor name in today's spelling; None for tensors that hold no weight."""
        ...

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model needs; a tied head is absent."""
        ...

    def tied(self, spec: ModelSpec) -> dict[str, str]:
        """Tensors that a checkpoint may hold a second time, and the tensor that each must equal."""
        ...

    def ffn_names(self, spec: ModelSpec, layer: int) -> FfnNames:
        """The FFN tensors of a layer; biases that the model lacks are None."""
        ...

    def layer_of(self, name: str) -> int | None:
        """The decoder layer that a tensor belongs to."""
        ...

    def group_of(self, name: str) -> str:
        """'embed', 'layer.N' or 'head': what a tensor is read together with."""
        ...

    def skeleton(self, spec: ModelSpec) -> Any:
        """transformers' model on the meta device, without FFN matrices; `workbench.models.build.skeleton`."""
        ...

    def install(self, model: Any, layer: int, module: Any) -> None:
        """Put `module` where the layer's FFN runs.

        It is given x float32 [..., d_model], after the layer's norm, and returns the FFN's output of that shape,
        biases included, in memory of its own: the layer may add to it in place.
        """
        ...

    def ffn_norm(self, model: Any, layer: int) -> Any | None:
        """The norm whose output the layer's FFN is given; None where that is the residual stream itself."""
        ...

    def activated_linears(self, model: Any) -> list[Any]:
        """Of a dense model, each layer's linear whose output the activation sits on."""
        ...

    def set_activation(self, model: Any, layer: int, module: Any) -> None:
        """Put `module` where a dense model's FFN activation of that layer runs."""
        ...

    def kv_shape(self, spec: ModelSpec) -> tuple[int, int]:
        """Heads of the KV cache and the width of each, as transformers' attention hands them to the cache."""
        ...
