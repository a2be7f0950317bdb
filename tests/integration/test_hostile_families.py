"""Bad input to each architecture: one line that names the fault, nothing written, and no code of a checkpoint run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, make_tiny

from workbench.capture.activations import FfnTap, dense, tokenizer
from workbench.errors import CheckpointError
from workbench.experiments.convert import convert
from workbench.models import family, supported
from workbench.spec import ModelSpec

TYPES = ("falcon", "llama", "opt", "persimmon", "phi")
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("originals")
    return {model_type: make_tiny(place / model_type, model_type) for model_type in TYPES}


@pytest.fixture
def copies(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copies a tiny checkpoint of a type, to be damaged."""
    return lambda model_type: Path(shutil.copytree(originals[model_type], tmp_path / "model"))


def refused(model: Path, match: str) -> None:
    """Neither a conversion nor a dense run takes it: each ends in one line that matches, and nothing is written."""
    out = model.parent / "store"
    for run in (lambda: convert(model, out), lambda: dense(model)):
        with pytest.raises(CheckpointError, match=match) as caught:
            run()
        assert "\n" not in str(caught.value)
    assert not out.exists()
    assert not out.with_name(out.name + ".partial").exists()


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **fields}}


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("falcon", {"num_hidden_layers": None}, "num_hidden_layers is None"),
    ("falcon", {"num_attention_heads": 5}, "64 is not a multiple of num_attention_heads 5"),
    ("falcon", {"ffn_hidden_size": "wide"}, "ffn_hidden_size is 'wide'"),
    ("falcon", {"ffn_hidden_size": 256}, r"dense_h_to_4h\.weight is \[160, 64\], .* \[256, 64\]"),
    ("falcon", {"alibi": "no"}, "alibi is 'no', not true or false"),
    ("falcon", {"bias": True}, r"query_key_value\.bias \[96\] is missing"),
    ("falcon", {"multi_query": False}, r"query_key_value\.weight is \[96, 64\], .* \[192, 64\]"),
    ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads is 2 for 4 attention heads"),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 3}, "4 is not a multiple of num_kv_heads 3"),
    ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "without parallel_attn"),
    ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn is 3"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2"),
    ("falcon", {"parallel_attn": False}, r"post_attention_layernorm\.weight \[64\] is missing"),
    ("falcon", {"tie_word_embeddings": False}, r"lm_head\.weight \[96, 64\] is missing"),
    ("falcon", {"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0, not a positive number"),
    ("falcon", {"activation": "gelu"}, "activation 'gelu' is not ReLU.*workbench relufy.*--force"),
    ("falcon", {"activation": None}, "activation is None, not the name"),
    ("falcon", {"n_layer": 3}, "n_layer is 3 and num_hidden_layers 2"),
    ("falcon", {"rope_parameters": [1]}, r"rope_parameters is \[1\], not a table"),
    ("persimmon", {"num_attention_heads": 0}, "num_attention_heads is 0"),
    ("persimmon", {"intermediate_size": 96}, r"dense_h_to_4h\.weight is \[160, 64\], .* \[96, 64\]"),
    ("persimmon", {"qk_layernorm": False}, r"[qk]_layernorm\.\w+ \[16\] belongs to no part of a persimmon model"),
    ("persimmon", {"qk_layernorm": 1}, "qk_layernorm is 1, not true or false"),
    ("persimmon", {"head_dim": 32}, "head_dim is 32, Persimmon's heads have 16"),
    ("persimmon", {"hidden_act": "gelu"}, "'gelu' is not ReLU"),
    ("persimmon", rope(rope_type="default", partial_rotary_factor=0.2), "3 of the 16 values .* even"),
    ("persimmon", rope(rope_type="default", partial_rotary_factor=1.5), "partial_rotary_factor is 1.5"),
    ("persimmon", rope(rope_type="default", partial_rotary_factor=0), "partial_rotary_factor is 0"),
    ("phi", {"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
    ("phi", {"num_key_value_heads": 2}, r"k_proj\.weight is \[64, 64\], .* \[32, 64\]"),
    ("phi", {"num_key_value_heads": True}, "num_key_value_heads is True"),
    ("phi", {"qk_layernorm": True}, r"q_layernorm\.weight \[16\] is missing"),
    ("phi", {"head_dim": 8}, "head_dim is 8, Phi's heads have 16"),
    ("phi", {"hidden_act": "gelu_new"}, "'gelu_new' is not ReLU"),
    ("phi", {"tie_word_embeddings": True}, r"lm_head\.weight differs from model\.embed_tokens\.weight"),
    ("phi", {"vocab_size": 97}, r"embed_tokens\.weight is \[96, 64\], .* \[97, 64\]"),
    ("phi", {"layer_norm_eps": "small"}, "layer_norm_eps is 'small'"),
    ("llama", {"hidden_size": 64.5}, "hidden_size is 64.5"),
    ("llama", {"hidden_act": "silu"}, "'silu' is not ReLU"),
    ("llama", {"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
    ("llama", {"head_dim": 24}, r"q_proj\.weight is \[64, 64\], .* \[96, 64\]"),
    ("llama", {"head_dim": 15}, "15 of the 15 values .* even"),
    ("llama", {"head_dim": 10**9}, "1000000000 of the 1000000000 values"),
    ("llama", {"attention_bias": True}, r"q_proj\.bias \[64\] is missing"),
    ("llama", {"mlp_bias": True}, r"gate_proj\.bias \[160\] is missing"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps is None"),
    ("llama", {"max_position_embeddings": -1}, "max_position_embeddings is -1"),
    ("llama", rope(rope_type="spiral"), "rope_parameters of type 'spiral' is not known; known: default, linear"),
    ("llama", rope(rope_type=["linear"]), "of type .* is not known"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is None, not a number of at least 1"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', not a table"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor is '4'"),
    ("llama", rope(rope_type="dynamic", factor=0.5), "factor is 0.5"),
    ("llama", rope(rope_type="linear", factor=2.0, partial_rotary_factor=0.5), "cannot be with a partial_rotary"),
    ("llama", {"rope_parameters": {"rope_theta": -1.0}}, "rope_theta is -1.0, not a positive number"),
    ("llama", rope(rope_type="llama3", factor=2.0), "low_freq_factor is None"),
    (
        "llama",
        rope(rope_type="llama3", factor=2.0, low_freq_factor=4.0, high_freq_factor=1.0),
        "high_freq_factor is not above low_freq_factor",
    ),
    ("llama", rope(rope_type="longrope", short_factor=[1.0] * 8, long_factor=3), "long_factor is 3, not a list"),
    (
        "llama",
        rope(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[1.0]),
        "long_factor has 1 numbers, a head has 8",
    ),
    (
        "llama",
        rope(rope_type="yarn", factor=2.0, original_max_position_embeddings="16"),
        "original_max_position_embeddings is '16'",
    ),
    ("llama", {"hidden_act": "fatrelu"}, "hidden_act_param has None, not a number"),
    ("llama", {"hidden_act": "fatrelu", "hidden_act_param": [0.1]}, "has 1 thresholds for 2 layers"),
    ("llama", {"hidden_act": "fatrelu", "hidden_act_param": [0.1, -0.1]}, "has -0.1, not a number of at least 0"),
    ("llama", {"hidden_act": "fatrelu", "hidden_act_param": float("nan")}, "has nan"),
    ("llama", {"hidden_act": "fatrelu", "hidden_act_param": True}, "has True"),
    (
        "llama",
        {"hidden_act": "fatrelu", "hidden_act_param": 0.1, "num_hidden_layers": 10**12},
        "num_hidden_layers is 1000000000000, more than",
    ),
    ("opt", {"activation_function": "fatrelu", "hidden_act_param": {}}, "has {}, not a number"),
    ("opt", {"activation_function": 3}, "activation_function is 3, not the name"),
]


@pytest.mark.parametrize(("model_type", "fields", "match"), CONFIGS, ids=[f"{c[0]}: {c[2][:40]}" for c in CONFIGS])
def test_config(copies: Callable[[str], Path], model_type: str, fields: dict[str, Any], match: str) -> None:
    model = copies(model_type)
    edit_config(model, **fields)
    refused(model, match)


TENSORS: dict[str, tuple[Callable[[Weights, str], Any], str]] = {
    "missing": (lambda w, up: w.pop(up), "is missing"),
    "extra": (lambda w, up: w.update(adapter=torch.zeros(3)), r"tensor adapter \[3\] belongs to no part"),
    "extra in a layer": (lambda w, up: w.update({up + "_scale": torch.ones(1)}), r"_scale \[1\] belongs to no part"),
    "transposed": (lambda w, up: w.update({up: w[up].T.contiguous()}), r"is \[64, 160\], config\.json asks for"),
    "missing layer": (lambda w, up: [w.pop(n) for n in list(w) if ".1." in n], r"2 layers, the weights have 1"),
    "extra layer": (
        lambda w, up: w.update({up.replace(".1.", ".2."): w[up].clone()}),
        r"says 2 layers, the weights have 3 \(up to layer 2\)",
    ),
    "named twice": (lambda w, up: w.update({up.split(".", 1)[1]: w[up].clone()}), "is there twice"),
}


@pytest.mark.parametrize("damage", TENSORS)
@pytest.mark.parametrize("model_type", TYPES)
def test_tensors(copies: Callable[[str], Path], model_type: str, damage: str) -> None:
    model = copies(model_type)
    module = family(model_type)
    weights = load_file(model / "model.safetensors")
    spec = module.spec(json.loads((model / "config.json").read_text()))
    change, match = TENSORS[damage]
    change(weights, module.ffn_names(spec, 1).up)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    refused(model, match)


@pytest.mark.parametrize("model_type", TYPES)
def test_weights_that_are_not_finite(copies: Callable[[str], Path], model_type: str, tmp_path: Path) -> None:
    model = copies(model_type)
    weights = load_file(model / "model.safetensors")
    spec = family(model_type).spec(json.loads((model / "config.json").read_text()))
    name = family(model_type).ffn_names(spec, 1).matrices[-1]
    weights[name].view(-1)[5] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN or infinity"):
        convert(model, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("model_type", TYPES)
def test_an_activation_that_is_not_sparse_needs_force(tmp_path: Path, model_type: str) -> None:
    field = family(model_type).ACTIVATION_FIELD
    overrides: dict[str, Any] = {field: "silu"}
    model = make_tiny(tmp_path / "model", model_type, **overrides)
    refused(model, "activation 'silu' is not ReLU, so few neurons are zero; run `workbench relufy`")
    assert convert(model, tmp_path / "forced", force=True).spec.activation == "silu"
    ids = torch.arange(6)[None]
    assert torch.isfinite(dense(model, force=True)(ids).logits).all()


def test_settings_that_only_transformers_checks(copies: Callable[[str], Path]) -> None:
    model = copies("llama")
    edit_config(model, initializer_range="wide")
    with pytest.raises(CheckpointError, match="transformers cannot build the model from it") as caught:
        dense(model)
    assert "\n" not in str(caught.value)
    spec = family("llama").spec(json.loads((model / "config.json").read_text()))
    with pytest.raises(CheckpointError, match="transformers cannot build the model from it"):
        family("llama").skeleton(spec)


def test_settings_that_would_change_what_a_forward_returns(copies: Callable[[str], Path]) -> None:
    for model_type in ("falcon", "llama"):
        model = copies(model_type)
        ids = torch.arange(6)[None]
        wanted = dense(model)(ids).logits
        edit_config(model, return_dict=False, output_attentions=True, use_cache=False, attn_implementation="eager")
        loaded = dense(model)
        assert torch.equal(loaded(ids).logits, wanted)
        assert loaded.config._attn_implementation == "sdpa"
        shutil.rmtree(model)


def test_a_config_is_not_changed_by_what_is_built_from_it(copies: Callable[[str], Path]) -> None:
    model = copies("llama")
    edit_config(model, rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=None)
    config = json.loads((model / "config.json").read_text())
    spec = family("llama").spec(config)
    family("llama").skeleton(spec)
    assert spec == family("llama").spec(json.loads((model / "config.json").read_text()))


# code that comes with a checkpoint

CODE = """
import pathlib

pathlib.Path({marker!r}).write_text("code ran")
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = {model_type!r}


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def with_code(model: Path, model_type: str) -> Path:
    """Gives a Llama checkpoint code of its own; returns the file that the code writes when it runs."""
    marker = model.parent / "marker"
    (model / "own.py").write_text(CODE.format(marker=str(marker), model_type=model_type))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_config(model, model_type=model_type, auto_map=auto_map)
    return marker


@pytest.mark.parametrize("model_type", ["llama", "sparsellama"])
@pytest.mark.parametrize("trust", [False, True])
def test_code_of_a_known_architecture_is_never_run(
    copies: Callable[[str], Path], tmp_path: Path, model_type: str, trust: bool
) -> None:
    model = copies("llama")
    ids = torch.arange(6)[None]
    wanted = dense(model)(ids).logits
    marker = with_code(model, model_type)
    assert torch.equal(dense(model, trust_remote_code=trust)(ids).logits, wanted)
    assert convert(model, tmp_path / "store").spec.model_type == "llama"
    assert not marker.exists()


def test_code_of_an_unknown_architecture_is_run_on_request_only(
    copies: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = copies("llama")
    ids = torch.arange(6)[None]
    wanted = dense(model)(ids).logits
    marker = with_code(model, "own-llama")
    with pytest.raises(CheckpointError, match=r"'own-llama' has code of its own .* --trust-remote-code") as caught:
        dense(model)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"'own-llama' has code of its own.*supported: falcon, llama") as caught:
        convert(model, tmp_path / "store")
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    assert torch.equal(dense(model, trust_remote_code=True)(ids).logits, wanted)
    assert marker.read_text() == "code ran"
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is missing"):
        dense(model, trust_remote_code=True)


def test_an_unknown_architecture_without_code(copies: Callable[[str], Path]) -> None:
    model = copies("llama")
    edit_config(model, model_type="gpt2")
    for trust in (False, True):
        with pytest.raises(CheckpointError, match="'gpt2' is not supported; supported: falcon, llama, opt, persimmon"):
            dense(model, trust_remote_code=trust)


def test_code_of_a_tokenizer_is_not_run(copies: Callable[[str], Path]) -> None:
    model = copies("llama")
    marker = model.parent / "marker"
    (model / "own.py").write_text(CODE.format(marker=str(marker), model_type="x"))
    auto_map = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": auto_map}))
    with pytest.raises(CheckpointError, match="no usable tokenizer") as caught:
        tokenizer(model)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_a_tap_needs_a_threshold_for_each_layer(originals: dict[str, Path]) -> None:
    model = dense(originals["llama"])
    with pytest.raises(ValueError, match="3 thresholds for 2 layers"):
        FfnTap(family("llama").activated_linears(model), thresholds=[0.0, 0.1, 0.2])


def test_supported() -> None:
    assert supported() == TYPES
    assert family("sparsellama") is family("llama")
    assert family("RefinedWeb") is family("RefinedWebModel") is family("falcon")
    spec = family("sparsellama").spec(
        {
            "model_type": "sparsellama", "hidden_act": "fatrelu", "hidden_act_param": 0.01, "hidden_size": 4096,
            "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
            "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_scaling": None,
            "pretraining_tp": 1, "tie_word_embeddings": False,
        }
    )  # fmt: skip
    assert isinstance(spec, ModelSpec)
    assert (spec.model_type, spec.activation, spec.parts) == ("llama", "relu", 3)
    assert spec.thresholds == (0.01,) * 32
