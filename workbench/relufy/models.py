"""The original model, the student made from it, and the checkpoint that the student is written as."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from workbench.capture.activations import dense
from workbench.errors import CheckpointError
from workbench.models import family
from workbench.models.activation import FATRELU, FATRELU_FIELD
from workbench.models.checkpoint import Checkpoint
from workbench.models.hub import locate
from workbench.models.weights import Weights
from workbench.relufy.config import RelufySpec
from workbench.spec import ModelSpec
from workbench.training.state import write_atomic

SPARSE = ("relu", "relu2")
_BIAS_FIELD = {"llama": "mlp_bias", "falcon": "bias", "opt": "enable_bias"}
"""The field of config.json that gives an architecture's FFN its biases; those of the others always have them."""


@dataclass(frozen=True)
class Original:
    """A checkpoint whose FFN is not sparse: where it is, its name, geometry, the dtype it is stored in, its digest."""

    path: Path
    name: str
    spec: ModelSpec
    dtype: str
    digest: str

    def student_spec(self, spec: RelufySpec, thresholds: Sequence[float] = ()) -> ModelSpec:
        """The geometry of the ReLU model: another activation, and biases where a shift needs one."""
        arch = family(self.spec.model_type)
        config = {**self.spec.config, arch.ACTIVATION_FIELD: "relu"}
        if any(thresholds):
            config |= {arch.ACTIVATION_FIELD: FATRELU, FATRELU_FIELD: [float(t) for t in thresholds]}
        if spec.activation == "shifted_relu" and self.spec.model_type in _BIAS_FIELD:
            config[_BIAS_FIELD[self.spec.model_type]] = True
        return arch.spec(config)


def open_original(model: str | Path) -> Original:
    """What relufy needs to know of a checkpoint, without loading it whole.

    CheckpointError when its FFN is sparse already, or as `Weights` has it.
    """
    path, name = locate(model)
    with Checkpoint(path, name) as checkpoint:
        weights = Weights(checkpoint, force=True)
        if weights.spec.activation in SPARSE:
            raise CheckpointError(
                f"{name}: its activation is already {weights.spec.activation}, so there is nothing to replace; "
                f"run `workbench convert` on it as it is"
            )
        return Original(path, name, weights.spec, weights.dtype, checkpoint.fingerprint()["digest"])


def make_student(original: Original, spec: RelufySpec, device: str) -> Any:
    """The original in float32 on `device`, nothing trainable yet, the shift folded into the biases.

    Its activation modules are still the original's; the trainer puts its own in.
    """
    student = dense(original.path, "float32", device, force=True)
    arch = family(original.spec.model_type)
    present = student.state_dict()
    for name, shape in arch.tensor_shapes(original.student_spec(spec)).items():
        if name not in present:
            module = student.get_submodule(name.removesuffix(".bias"))
            module.bias = nn.Parameter(torch.zeros(shape, device=device), requires_grad=False)
    with torch.no_grad():
        for linear in arch.activated_linears(student):
            if spec.shift:
                linear.bias.sub_(spec.shift)
    return student


def trainable(student: Any, original: Original, spec: RelufySpec) -> dict[str, nn.Parameter]:
    """The parameters that move, by name; they and no others require a gradient afterwards.

    A bias that only a shift's switch brought stays zero, but that of the activated linear.
    """
    arch, after = family(original.spec.model_type), original.student_spec(spec)
    activated = {id(linear.bias) for linear in arch.activated_linears(student) if linear.bias is not None}
    added = arch.tensor_shapes(after).keys() - arch.tensor_shapes(original.spec).keys()
    ffn: set[str] = set()
    for layer in range(after.num_layers):
        names = arch.ffn_names(after, layer)
        ffn |= {n for n in (*names.matrices, names.up_bias, names.down_bias, names.gate_bias) if n is not None}
    norms = {
        f"{prefix}.{name}"
        for prefix, module in student.named_modules()
        if not isinstance(module, nn.Linear | nn.Embedding)
        for name, p in module.named_parameters(recurse=False)
        if p.dim() == 1
    }
    found = {}
    for name, parameter in student.named_parameters():
        moves = spec.train == "all" or name in ffn or name in norms
        parameter.requires_grad_(moves and (name not in added or id(parameter) in activated))
        if parameter.requires_grad:
            found[name] = parameter
    return found


def weights_of(student: Any, original: Original, spec: RelufySpec) -> dict[str, torch.Tensor]:
    """The student's tensors as they are written: the original's dtype, contiguous, on the CPU, no tied copies."""
    present = student.state_dict()
    dtype = getattr(torch, original.dtype)
    shapes = family(original.spec.model_type).tensor_shapes(original.student_spec(spec))
    return {name: present[name].to(dtype).contiguous().cpu() for name in shapes}


def round_weights(student: Any, original: Original) -> None:
    """Round the student's weights to the dtype they are written in, so that what is measured is what is written."""
    dtype = getattr(torch, original.dtype)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.copy_(parameter.to(dtype))


def write_checkpoint(
    folder: Path,
    student: Any,
    original: Original,
    spec: RelufySpec,
    thresholds: Sequence[float],
    card: dict[str, Any],
    text: str,
) -> None:
    """A Hugging Face checkpoint with its card in `folder`, which is made. TrainingError when it cannot be written.

    It is checked as any checkpoint before this returns.
    """
    folder.mkdir()
    config = original.student_spec(spec, thresholds).config
    with Checkpoint(original.path, original.name) as checkpoint:
        for file in checkpoint.tokenizer_files():
            shutil.copyfile(file, folder / file.name)
    write_atomic(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    body = save(weights_of(student, original, spec), metadata={"format": "pt"})
    write_atomic(folder / "model.safetensors", body)
    write_atomic(folder / "card.json", (json.dumps(card, indent=1) + "\n").encode())
    write_atomic(folder / "CARD.md", text.encode())
    with Checkpoint(folder, original.name) as checkpoint:
        Weights(checkpoint)
