"""OPT's skeleton, filled from a store with the FFN put back by hand, against transformers' own dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_models import make_opt
from torch import nn
from transformers import OPTForCausalLM

from workbench.errors import CheckpointError
from workbench.experiments.convert import convert
from workbench.models import family, opt, supported

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "post-norm": {"do_layer_norm_before": False},
    "no bias": {"enable_bias": False},
    "norm without weights": {"layer_norm_elementwise_affine": False},
    "projected embedding": {"word_embed_proj_dim": 32},
    "untied": {"tie_word_embeddings": False},
    "all at once": {
        "do_layer_norm_before": False,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "word_embed_proj_dim": 32,
        "tie_word_embeddings": False,
    },
}


class StoredFfn(nn.Module):
    """A dense FFN from the rows of a store; notes the shapes that it is given."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, biases: list[torch.Tensor | None]) -> None:
        super().__init__()
        self.up, self.down, self.biases = up, down, biases
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(x.shape))
        hidden = torch.relu(nn.functional.linear(x, self.up, self.biases[0]))
        return nn.functional.linear(hidden, self.down.T, self.biases[1])


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_skeleton_with_stored_weights_is_the_dense_model(tmp_path: Path, overrides: dict[str, Any]) -> None:
    checkpoint = make_opt(tmp_path / "opt", **overrides)
    store = convert(checkpoint, tmp_path / "store")
    model = opt.skeleton(store.spec)
    assert all(p.is_meta for p in model.parameters())
    largest = max(p.numel() for name, p in model.named_parameters() if "layers." in name)
    assert largest == store.spec.d_model**2  # no FFN matrix, not even on the meta device

    resident = {}
    with safe_open(store.resident_path, "pt") as opened:
        for group in store.groups:
            resident |= {name: opened.get_tensor(name) for name in group.tensors}
    biases = {name for i in range(2) for name in (f"{i}.fc1.bias", f"{i}.fc2.bias")}
    kept = {name: t for name, t in resident.items() if name.split("layers.")[-1] not in biases}
    missing, extra = model.load_state_dict(kept, strict=False, assign=True)
    assert (missing, extra) == ([] if overrides.get("tie_word_embeddings") is False else ["lm_head.weight"], [])
    model.tie_weights()

    ffns = []
    for layer in range(store.spec.num_layers):
        names = opt.ffn_names(store.spec, layer)
        up, down = (torch.from_numpy(store.rows(layer, part).copy()) for part in (0, 1))
        ffns.append(StoredFfn(up, down, [resident[n] if n else None for n in (names.up_bias, names.down_bias)]))
        opt.install(model, layer, ffns[-1])
    ids = torch.arange(3 * 11).reshape(3, 11)
    with torch.no_grad():
        dense = OPTForCausalLM.from_pretrained(checkpoint).eval()
        torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=0, atol=1e-5)
    assert [ffn.seen for ffn in ffns] == [[(33, 64)]] * 2
    assert [linear.out_features for linear in opt.activated_linears(dense)] == [256, 256]


def test_a_layer_without_ffn_says_so(tiny_opt: Path, tmp_path: Path) -> None:
    model = opt.skeleton(convert(tiny_opt, tmp_path / "store").spec).to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="layer 0: no FFN was installed"):
        model(torch.arange(4)[None])


def test_names_and_groups() -> None:
    assert opt.layer_of("model.decoder.layers.12.fc1.weight") == 12
    assert opt.layer_of("model.decoder.final_layer_norm.weight") is None
    assert opt.group_of("model.decoder.layers.3.self_attn_layer_norm.bias") == "layer.3"
    assert opt.group_of("model.decoder.embed_positions.weight") == "embed"
    assert opt.group_of("model.decoder.project_in.weight") == "embed"
    assert {opt.group_of(f"model.decoder.{n}.weight") for n in ("final_layer_norm", "project_out")} == {"head"}
    assert opt.group_of("lm_head.weight") == "head"


def test_unknown_family() -> None:
    assert family("opt") is opt
    with pytest.raises(CheckpointError, match=r"'gpt2' is not supported; supported: .*opt") as caught:
        family("gpt2")
    assert "opt" in supported()
    assert "\n" not in str(caught.value)
