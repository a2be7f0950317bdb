"""Every architecture in all its variants: a store and transformers' skeleton, against transformers' own dense model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, make_tiny
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from workbench.ablation import Ablation
from workbench.capture.activations import FfnTap, active_neurons, dense, tokenizer
from workbench.engines import load
from workbench.engines.kv import cache_argument, new_cache
from workbench.experiments.convert import convert
from workbench.flash.store import Store
from workbench.models import family

TOLERANCE = 1e-4
"""Largest difference of a logit, in float32, between two orders of summation. The logits are of the order of 1."""


@dataclass(frozen=True)
class Variant:
    """A tiny model: fields of transformers' config, and what its config.json says instead (None removes a field)."""

    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    thresholds: tuple[float, ...] = ()


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    """Rotary settings in the new spelling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
OLD_7B = {
    "model_type": "RefinedWebModel",
    "architectures": ["RWForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_RW.RWConfig", "AutoModelForCausalLM": "modelling_RW.RWForCausalLM"},
    "n_layer": 2,
    "n_head": 4,
    **dict.fromkeys(["num_hidden_layers", "num_attention_heads", "num_kv_heads", "new_decoder_architecture"]),
    **dict.fromkeys(["max_position_embeddings", "ffn_hidden_size", "rope_parameters"]),
}
OLD_40B = {**OLD_7B, "model_type": "RefinedWeb", "n_head_kv": 2, **dict.fromkeys(["multi_query"])}
PROSPARSE = {
    "model_type": "sparsellama",
    "architectures": ["SparseLlamaForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_sparsellama.SparseLlamaForCausalLM"},
    "hidden_act": "fatrelu",
    "hidden_act_param": 0.25,
    "rope_scaling": None,
    **dict.fromkeys(["rope_parameters"]),
}
FATRELU: dict[str, Any] = {"hidden_act": "fatrelu", "hidden_act_param": [0.125, 0.5]}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}

VARIANTS: dict[str, Variant] = {
    "opt": Variant("opt"),
    "opt post-norm": Variant("opt", {"do_layer_norm_before": False}),
    "opt projected (350m)": Variant("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt no bias": Variant("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "opt untied": Variant("opt", {"tie_word_embeddings": False}),
    "opt relu2": Variant("opt", {"activation_function": "relu2"}),
    "opt fatrelu": Variant(
        "opt", {}, {"activation_function": "fatrelu", "hidden_act_param": [0.125, 0.5]}, thresholds=(0.125, 0.5)
    ),
    "falcon 7b": Variant("falcon"),
    "falcon bias, untied": Variant("falcon", {"bias": True, "tie_word_embeddings": False}),
    "falcon many heads": Variant("falcon", {"multi_query": False, "bias": True}),
    "falcon rw-1b": Variant("falcon", {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}),
    "falcon alibi, 3 heads": Variant("falcon", {"alibi": True, "num_attention_heads": 6, "hidden_size": 96}),
    "falcon sequential": Variant("falcon", {"parallel_attn": False}),
    "falcon 40b": Variant("falcon", NEW),
    "falcon 40b alibi, bias": Variant("falcon", {**NEW, "alibi": True, "bias": True}),
    "falcon 11b": Variant("falcon", {**NEW, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
    "falcon two norms": Variant("falcon", {**NEW, "num_ln_in_parallel_attn": 2, "num_kv_heads": 4}),
    "falcon linear rope": Variant("falcon", rope("linear", factor=2.0)),
    "falcon of May 2023, 7b": Variant("falcon", {"ffn_hidden_size": 256}, OLD_7B),
    "falcon of May 2023, 40b": Variant("falcon", {**NEW, "ffn_hidden_size": 256}, OLD_40B),
    "falcon fatrelu": Variant("falcon", {}, {"activation": "fatrelu", "hidden_act_param": 0.25}, (0.25, 0.25)),
    "persimmon": Variant("persimmon"),
    "persimmon no qk norms": Variant("persimmon", {"qk_layernorm": False, "tie_word_embeddings": True}),
    "persimmon relu": Variant("persimmon", {"hidden_act": "relu", "partial_rotary_factor": 0.25}),
    "persimmon relu_squared": Variant("persimmon", {}, {"hidden_act": "relu_squared"}),
    "persimmon old rope": Variant(
        "persimmon", {"rope_theta": 25000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    ),
    "phi": Variant("phi"),
    "phi-2 rotation": Variant("phi", {"hidden_size": 80, "partial_rotary_factor": 0.4}),
    "phi qk norms": Variant("phi", {"qk_layernorm": True}),
    "phi grouped queries": Variant("phi", {"num_key_value_heads": 2, "qk_layernorm": True}),
    "phi tied": Variant("phi", {"tie_word_embeddings": True}),
    "phi fatrelu": Variant("phi", {}, FATRELU, (0.125, 0.5)),
    "llama": Variant("llama"),
    "llama grouped queries": Variant("llama", {"num_key_value_heads": 2}),
    "llama one key head": Variant("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama biases": Variant("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": Variant("llama", {"head_dim": 24, "num_key_value_heads": 2}),
    "llama relu2": Variant("llama", {"hidden_act": "relu2"}),
    "llama prosparse": Variant("llama", {}, PROSPARSE, (0.25, 0.25)),
    "llama fatrelu, biases": Variant("llama", {"mlp_bias": True}, FATRELU, (0.125, 0.5)),
    "llama theta": Variant("llama", {"rope_theta": 500.0}),
    "llama old linear": Variant("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama linear": Variant("llama", rope("linear", factor=2.5)),
    "llama dynamic": Variant("llama", {**rope("dynamic", factor=2.0)}),
    "llama old yarn": Variant(
        "llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
    ),
    "llama yarn": Variant(
        "llama", rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, attention_factor=1.2)
    ),
    "llama llama3": Variant("llama", rope("llama3", **LLAMA3)),
    "llama old llama3": Variant("llama", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    "llama longrope": Variant(
        "llama", rope("longrope", factor=2.0, original_max_position_embeddings=32, **LONG)
    ),
    "llama proportional": Variant("llama", rope("proportional", partial_rotary_factor=0.5)),
}  # fmt: skip
SOME = ["opt", "opt fatrelu", "falcon rw-1b", "falcon 40b", "persimmon", "phi fatrelu", "llama fatrelu, biases"]
"""One or two of each architecture, for what does not differ between its variants."""


@dataclass(frozen=True)
class Made:
    """A variant's checkpoint, its store, and transformers' own model of it in float32."""

    variant: Variant
    checkpoint: Path
    store: Store
    reference: Any
    ids: torch.Tensor
    logits: torch.Tensor


class Thresholded(nn.Module):
    """FATReLU as its paper defines it, apart from the workbench's own."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return torch.relu(z) * (z > self.threshold)


def make(path: Path, variant: Variant, **options: Any) -> Made:
    checkpoint = make_tiny(path / "model", variant.model_type, **variant.fields, **options)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa").eval()
    for layer, threshold in enumerate(variant.thresholds):
        family(variant.model_type).set_activation(reference, layer, Thresholded(threshold))
    gone = tuple(name for name, value in variant.written.items() if value is None and name != "rope_scaling")
    edit_config(checkpoint, gone, **{name: value for name, value in variant.written.items() if name not in gone})
    ids = torch.randint(0, reference.config.vocab_size, (24,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = reference(ids[None]).logits[0]
    return Made(variant, checkpoint, convert(checkpoint, path / "store"), reference, ids, logits)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The matrices are tiny: torch's threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("family"), VARIANTS[request.param])


each = pytest.mark.parametrize("made", VARIANTS, indirect=True)
some = pytest.mark.parametrize("made", SOME, indirect=True)


class StoredFfn(nn.Module):
    """A dense FFN from the rows of a store, written out from the definition in `ModelSpec`."""

    def __init__(self, store: Store, layer: int, resident: dict[str, torch.Tensor]) -> None:
        super().__init__()
        names = family(store.spec.model_type).ffn_names(store.spec, layer)
        self.rows = [torch.from_numpy(store.rows(layer, part).copy()) for part in range(store.spec.parts)]
        self.up_bias, self.down_bias, self.gate_bias = (
            resident[name] if name else torch.zeros(()) for name in (names.up_bias, names.down_bias, names.gate_bias)
        )
        self.spec, self.threshold = store.spec, store.spec.threshold(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = x @ self.rows[0].T + self.up_bias
        z = x @ self.rows[2].T + self.gate_bias if self.spec.gated else up
        value = torch.where(z > self.threshold, z**2 if self.spec.activation == "relu2" else z, 0)
        return (value * up if self.spec.gated else value) @ self.rows[1] + self.down_bias


def filled_skeleton(store: Store) -> Any:
    """The skeleton with a store's resident weights and dense FFNs."""
    module = family(store.spec.model_type)
    model = module.skeleton(store.spec)
    with safe_open(store.resident_path, "pt") as opened:
        resident = {name: opened.get_tensor(name) for group in store.groups for name in group.tensors}
    own = model.state_dict().keys()
    missing, _ = model.load_state_dict({n: t for n, t in resident.items() if n in own}, strict=False, assign=True)
    assert set(missing) <= module.tied(store.spec).keys()
    names = [module.ffn_names(store.spec, layer) for layer in range(store.spec.num_layers)]
    ffn_biases = {bias for ffn in names for bias in (ffn.up_bias, ffn.down_bias, ffn.gate_bias)}
    assert resident.keys() - own == ffn_biases - {None}
    model.tie_weights()
    for layer in range(store.spec.num_layers):
        module.install(model, layer, StoredFfn(store, layer, resident))
    return model


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


@each
def test_skeleton_with_stored_weights_is_the_dense_model(made: Made) -> None:
    model = filled_skeleton(made.store)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    with torch.no_grad():
        assert difference(model(made.ids[None]).logits[0], made.logits) < TOLERANCE
        cache = new_cache(made.store.spec, 32)
        named = {cache_argument(model): cache, "use_cache": True}
        out = [model(input_ids=made.ids[None, :9], logits_to_keep=2, **named).logits[0]]
        assert len(out[0]) == 2
        out += [model(input_ids=i[None, None], logits_to_keep=1, **named).logits[0] for i in made.ids[9:]]
    assert difference(torch.cat(out), made.logits[7:]) < TOLERANCE


@some
def test_the_skeleton_is_not_allocated(made: Made) -> None:
    model, spec = family(made.store.spec.model_type).skeleton(made.store.spec), made.store.spec
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert spec.d_ff not in {size for p in model.parameters() for size in p.shape}
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="layer 0: no FFN was installed"):
        model.to_empty(device="cpu")(made.ids[None])


@some
def test_every_part_shows_in_the_logits(made: Made) -> None:
    """Without this, an FFN, a norm or a bias that is left out could pass for right."""
    for name, parameter in made.reference.named_parameters():
        if ".1." in name and not name.endswith(("k_proj.bias", "k_layernorm.bias")):  # softmax hides a shift of keys
            kept = parameter.detach().clone()
            with torch.no_grad():
                parameter.mul_(0.5)
                assert difference(made.reference(made.ids[None]).logits[0], made.logits) > 10 * TOLERANCE, name
                parameter.copy_(kept)


@some
def test_thresholds_show_in_the_logits(made: Made) -> None:
    if made.variant.thresholds:
        model = dense(made.checkpoint)
        for layer in range(2):
            family(made.store.spec.model_type).set_activation(model, layer, nn.ReLU())
        assert difference(model(made.ids[None]).logits[0], made.logits) > 100 * TOLERANCE


@each
def test_the_engine_is_the_dense_model(made: Made) -> None:
    check_engine(made.store, made.ids, made.logits)


def check_engine(store: Store, ids: torch.Tensor, wanted: torch.Tensor) -> None:
    """Logits of the prompt's first half at once, then token by token."""
    half = len(ids) // 2
    with load(store.path, ablation=Ablation(predictor="oracle"), dram="64MB") as engine:
        got = [engine.prefill(ids[:half].tolist())[0], *(engine.step(int(token))[0] for token in ids[half:])]
        assert difference(torch.stack(got), wanted[half - 1 :]) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@some
def test_the_engine_on_16_bit_stores(made: Made, dtype: Any, tmp_path: Path) -> None:
    """Weights are rounded, arithmetic is not: the same tolerance as for float32 stores, against rounded weights."""
    rounded = copy.deepcopy(made.reference)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
        wanted = rounded(made.ids[None]).logits[0]
    assert difference(wanted, made.logits) > 10 * TOLERANCE  # rounding shows
    check_engine(convert(made.checkpoint, tmp_path / "store", dtype=dtype), made.ids, wanted)


@some
def test_dense_is_the_dense_model(made: Made) -> None:
    model = dense(made.checkpoint)
    spec, module = made.store.spec, family(made.store.spec.model_type)
    linears = module.activated_linears(model)
    thresholds = made.variant.thresholds
    with torch.no_grad(), FfnTap(linears, thresholds=spec.thresholds) as tap, FfnTap(linears) as plain:
        assert difference(model(made.ids[None]).logits[0], made.logits) < 1e-6
    again = module.spec(model.config.to_dict())
    assert (again.activation, again.thresholds) == (spec.activation, spec.thresholds) == (spec.activation, thresholds)
    assert module.tensor_shapes(again) == module.tensor_shapes(spec)
    for layer in range(2):
        assert tap.pre[layer].shape == (24, spec.d_ff)
        expected = plain.pre[layer] - (thresholds[layer] if thresholds else 0)
        torch.testing.assert_close(tap.pre[layer], expected, rtol=0, atol=1e-7)
        assert torch.equal(tap.pre[layer] > 0, plain.pre[layer] > (thresholds[layer] if thresholds else 0))
        share = (tap.pre[layer] > 0).float().mean()
        assert 0.05 < share < 0.95  # some of both
    found = active_neurons(model, linears, [made.ids.numpy()], spec.thresholds)
    assert [ids.tolist() for ids in found[1]] == [torch.nonzero(z > 0)[:, 0].tolist() for z in tap.pre[1]]


@some
def test_set_activation_and_activated_linears_are_the_ffns(made: Made) -> None:
    model = dense(made.checkpoint)
    module = family(made.store.spec.model_type)
    seen: dict[int, torch.Tensor] = {}

    class Noting(nn.Module):
        def __init__(self, layer: int) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            seen[self.layer] = z
            return torch.zeros_like(z)

    for layer in range(2):
        module.set_activation(model, layer, Noting(layer))
    with torch.no_grad(), FfnTap(module.activated_linears(model)) as tap:
        model(made.ids[None])
    assert all(torch.equal(seen[layer].reshape(24, -1), tap.pre[layer]) for layer in range(2))


@each
def test_the_cache_holds_what_kv_shape_says(made: Made) -> None:
    cache = DynamicCache(config=made.reference.config)
    with torch.no_grad():
        made.reference(made.ids[None, :5], use_cache=True, **{cache_argument(made.reference): cache})
    heads, width = family(made.variant.model_type).kv_shape(made.store.spec)
    layers: list[Any] = cache.layers
    for layer in layers:
        assert tuple(layer.keys.shape) == tuple(layer.values.shape) == (1, heads, 5, width)


@each
def test_names_and_groups(made: Made) -> None:
    spec, module = made.store.spec, family(made.store.spec.model_type)
    shapes = module.tensor_shapes(spec)
    state = made.reference.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items() if name not in module.tied(spec)} == shapes
    assert all(module.canonical(name) == name for name in shapes)
    for name in shapes:
        layer = module.layer_of(name)
        assert module.group_of(name) == (f"layer.{layer}" if f".{layer}." in name else module.group_of(name))
        assert (layer is None) == (module.group_of(name) in ("embed", "head"))
    first, second = ([n.replace(f".{i}.", ".N.") for n in made.store.group(f"layer.{i}").tensors] for i in (0, 1))
    assert first == second
    assert spec.parts == len(module.ffn_names(spec, 1).matrices)
    assert spec.max_positions == (2048 if "n_layer" in made.variant.written else 64)


BARE = {"opt": "model.", "falcon": "transformer.", "persimmon": "model.", "phi": "model.", "llama": "model."}
FREQUENCIES = {
    "falcon": "transformer.h.{}.self_attention.rotary.inv_freq",
    "llama": "model.layers.{}.self_attn.rotary_emb.inv_freq",
    "persimmon": "model.layers.{}.self_attn.rotary_emb.inv_freq",
    "phi": "model.layers.{}.self_attn.rotary_emb.inv_freq",
}


def rewrite(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change the tensors of a checkpoint."""
    weights = change(load_file(checkpoint / "model.safetensors"))
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("model_type", BARE)
def test_checkpoints_of_the_bare_decoder(tmp_path: Path, model_type: str) -> None:
    made = make(tmp_path, Variant(model_type, {"tie_word_embeddings": True}))
    head = {"lm_head.bias"} if model_type == "phi" else set()
    rewrite(
        made.checkpoint,
        lambda w: {n if n in head else n.removeprefix(BARE[model_type]): t for n, t in w.items()},
    )
    assert convert(made.checkpoint, tmp_path / "again").digest == made.store.digest
    assert difference(dense(made.checkpoint)(made.ids[None]).logits[0], made.logits) < 1e-6


@pytest.mark.parametrize("model_type", FREQUENCIES)
def test_stored_frequencies_and_a_second_copy_of_the_head(tmp_path: Path, model_type: str) -> None:
    made = make(tmp_path, Variant(model_type, {"tie_word_embeddings": True}))
    ((head, embed),) = family(model_type).tied(made.store.spec).items()
    extra = {FREQUENCIES[model_type].format(i): torch.ones(8) for i in range(2)}
    rewrite(made.checkpoint, lambda w: {**w, **extra, head: w[embed].clone()})
    assert convert(made.checkpoint, tmp_path / "again").digest == made.store.digest
    assert difference(dense(made.checkpoint)(made.ids[None]).logits[0], made.logits) < 1e-6


@pytest.mark.parametrize("model_type", BARE)
def test_pickled_checkpoints(tmp_path: Path, model_type: str) -> None:
    made = make(tmp_path, Variant(model_type))
    torch.save(load_file(made.checkpoint / "model.safetensors"), made.checkpoint / "pytorch_model.bin")
    (made.checkpoint / "model.safetensors").unlink()
    assert convert(made.checkpoint, tmp_path / "again").digest == made.store.digest
    assert difference(dense(made.checkpoint)(made.ids[None]).logits[0], made.logits) < 1e-6


@pytest.mark.parametrize("model_type", ["llama", "falcon"])
def test_sharded_checkpoints(tmp_path: Path, model_type: str) -> None:
    made = make(tmp_path, Variant(model_type))
    sharded = make_tiny(tmp_path / "sharded", model_type, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert convert(sharded, tmp_path / "again").digest == made.store.digest
    assert difference(dense(sharded)(made.ids[None]).logits[0], made.logits) < 1e-6


@pytest.mark.parametrize("model_type", BARE)
def test_defaults_are_transformers_own(model_type: str) -> None:
    """An absent field means the same to the workbench and to transformers."""
    module: Any = family(model_type)
    config = module.model_class().config_class()
    given = {name: getattr(config, name) for name in module._SIZES}
    spec = module.spec(given, force=True)
    for name, value in module._SWITCHES.items():
        assert getattr(config, name) == value
    assert spec.activation == getattr(config, module.ACTIVATION_FIELD)
    assert spec.max_positions == config.max_position_embeddings
    assert spec.d_ff == getattr(
        config, {"opt": "ffn_dim", "falcon": "ffn_hidden_size"}.get(model_type, "intermediate_size")
    )


LONGROPE = VARIANTS["llama longrope"]


def test_longrope_beyond_its_first_length(tmp_path: Path) -> None:
    """A prompt beyond the original length is run with the long factors, as transformers does."""
    made = make(tmp_path, LONGROPE)
    ids = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = made.reference(ids[None]).logits[0]
        again = made.reference(made.ids[None]).logits[0]
        model = filled_skeleton(made.store)
        assert difference(model(ids[None]).logits[0], wanted) < TOLERANCE
        assert difference(model(made.ids[None]).logits[0], again) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch-cpu", "mlx-cpu"])
def test_a_real_relu_llama(relu_135m: Path, tmp_path: Path, backend: str) -> None:
    """64 tokens of English, token by token from flash, and 64 more that follow from a part of them."""
    if backend.startswith("mlx"):
        pytest.importorskip("mlx.core", reason="MLX is not installed", exc_type=ImportError)
    store = convert(relu_135m, tmp_path / "store", dtype="float32")
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    ids = torch.tensor(tokenizer(relu_135m)(text)["input_ids"][:64])
    model = dense(relu_135m)
    assert store.spec.gated
    with torch.no_grad():
        wanted = model(ids[None]).logits[0]
        greedy = model.generate(ids[None, :16], max_new_tokens=64, do_sample=False)[0, 16:].tolist()
    with load(store.path, ablation=Ablation(predictor="oracle"), backend=backend, dram="150%") as engine:
        found = [step.token for step in engine.generate(ids[:16].tolist(), 64)]
        assert found == greedy[: len(found)]
        assert len(found) == 64 or found[-1] in engine.end_tokens
        assert difference(engine.logits(ids.tolist()), wanted) < TOLERANCE
        predicted = engine.step(int(ids[0]))[1].predicted
    assert predicted < store.spec.ffn_neurons / 2  # and the engine left most neurons out
