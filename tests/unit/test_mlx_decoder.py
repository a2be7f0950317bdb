"""The decoders in MLX: every variant of the five families against transformers, and the memory beneath them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from integration.test_families import SOME, TOLERANCE, VARIANTS, Made, make
from safetensors import safe_open
from transformers.cache_utils import DynamicCache

from workbench.engines.kv import cache_argument
from workbench.engines.mlx.decoder import Decoder, build
from workbench.engines.mlx.kv import LayerCache
from workbench.engines.mlx.weights import PAGE, ResidentWeights, shared_bytes
from workbench.engines.stats import StepClock
from workbench.experiments.convert import convert
from workbench.flash.layout import Group
from workbench.flash.reader import FlashReader
from workbench.flash.store import Store
from workbench.models import family

mx: Any = pytest.importorskip("mlx.core", reason="the extra `mlx` is not installed", exc_type=ImportError)

Ffn = Callable[[int, Any], Any]


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu() -> Iterator[None]:
    device, threads = mx.default_device(), torch.get_num_threads()
    mx.set_default_device(mx.cpu)
    torch.set_num_threads(1)
    yield
    mx.set_default_device(device)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("mlx"), VARIANTS[request.param])


each = pytest.mark.parametrize("made", VARIANTS, indirect=True)
some = pytest.mark.parametrize("made", SOME, indirect=True)


def linear(x: Any, weight: Any, bias: Any) -> Any:
    out = x @ weight.astype(mx.float32).T
    return out if bias is None else out + bias.astype(mx.float32)


def resident(store: Store) -> dict[str, Any]:
    """The store's resident tensors, float32."""
    with safe_open(store.resident_path, "pt") as opened:
        return {n: mx.array(opened.get_tensor(n).float().numpy()) for group in store.groups for n in group.tensors}


def dense_ffn(store: Store, weights: dict[str, Any]) -> Ffn:
    """The FFNs from the rows of a store, written out from the definition in `ModelSpec`."""
    spec, module = store.spec, family(store.spec.model_type)
    dtype = getattr(mx, store.dtype)
    rows = [
        [mx.array(np.array(store.rows(i, part))).view(dtype).astype(mx.float32) for part in range(spec.parts)]
        for i in range(spec.num_layers)
    ]

    def ffn(layer: int, x: Any) -> Any:
        names = module.ffn_names(spec, layer)
        up = linear(x, rows[layer][0], weights.get(names.up_bias or ""))
        z = linear(x, rows[layer][2], weights.get(names.gate_bias or "")) if spec.gated else up
        value = mx.where(z > spec.threshold(layer), z**2 if spec.activation == "relu2" else z, 0)
        return linear(value * up if spec.gated else value, rows[layer][1].T, weights.get(names.down_bias or ""))

    return ffn


def logits(decoder: Decoder, ffn: Ffn, caches: list[LayerCache], ids: list[int]) -> torch.Tensor:
    """Logits of `ids`, which follow what the caches hold, in one pass."""
    offset = caches[0].length
    h = decoder.embed(mx.array(ids), offset)
    for layer, cache in enumerate(caches):
        h, x = decoder.attend(layer, h, cache, offset)
        h = decoder.join(layer, h, ffn(layer, x))
    out = decoder.head(h)
    assert out.dtype == mx.float32
    return torch.from_numpy(np.array(out))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


@each
def test_the_decoder_is_transformers(made: Made) -> None:
    weights, ids = resident(made.store), made.ids.tolist()
    ffn = dense_ffn(made.store, weights)
    decoder = build(made.store.spec, weights, linear)
    assert difference(logits(decoder, ffn, decoder.new_cache(24), ids), made.logits) < TOLERANCE
    caches = decoder.new_cache(40)
    parts = [ids[:9], ids[9:14], *([i] for i in ids[14:])]
    assert difference(torch.cat([logits(decoder, ffn, caches, part) for part in parts]), made.logits) < TOLERANCE


@some
def test_the_decoder_without_compilation(made: Made) -> None:
    weights, ids = resident(made.store), made.ids.tolist()
    decoder, ffn = build(made.store.spec, weights, linear, compiled=False), dense_ffn(made.store, weights)
    caches = decoder.new_cache(24)
    assert difference(torch.cat([logits(decoder, ffn, caches, [i]) for i in ids]), made.logits) < TOLERANCE


@pytest.mark.parametrize("made", ["llama longrope", "falcon rw-1b", "falcon alibi, 3 heads"], indirect=True)
def test_positions_far_on(made: Made, tmp_path: Path) -> None:
    """Past the length where longrope changes its factors, and where alibi's bfloat16 no longer holds every position."""
    longrope = made.variant.model_type == "llama"
    length, positions = (50, 64) if longrope else (300, 320)
    far = make(tmp_path, replace(made.variant, fields={**made.variant.fields, "max_position_embeddings": positions}))
    ids = torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(2))
    weights = resident(far.store)
    decoder, ffn = build(far.store.spec, weights, linear), dense_ffn(far.store, weights)
    caches, cache = decoder.new_cache(length), DynamicCache(config=far.reference.config)
    for part in (ids[: length - 25], *ids[length - 25 :].split(1)):
        named = {cache_argument(far.reference): cache, "use_cache": True}
        with torch.no_grad():
            wanted = far.reference(input_ids=part[None], **named).logits[0]
        assert difference(logits(decoder, ffn, caches, part.tolist()), wanted) < TOLERANCE


@some
def test_rewind_and_resize(made: Made) -> None:
    weights, ids = resident(made.store), made.ids.tolist()
    decoder, ffn = build(made.store.spec, weights, linear), dense_ffn(made.store, weights)
    caches = decoder.new_cache(16)
    logits(decoder, ffn, caches, ids[:10])
    logits(decoder, ffn, caches, [1, 2, 3])  # another text, taken back
    for cache in caches:
        cache.rewind(10)
    assert difference(logits(decoder, ffn, caches, ids[10:12]), made.logits[10:12]) < TOLERANCE
    for cache in caches:
        cache.resize(24)
    assert difference(logits(decoder, ffn, caches, ids[12:22]), made.logits[12:22]) < TOLERANCE
    for cache in caches:
        cache.resize(23)
    assert difference(logits(decoder, ffn, caches, ids[22:23]), made.logits[22:23]) < TOLERANCE
    with pytest.raises(ValueError, match="24 tokens do not fit a cache of 23"):
        logits(decoder, ffn, caches, ids[23:])
    for cache in caches:
        cache.reset()
    assert difference(logits(decoder, ffn, caches, ids[:12]), made.logits[:12]) < TOLERANCE


def test_a_cache_refuses_what_it_cannot_hold() -> None:
    cache = LayerCache(2, 4, 8)
    cache.update(mx.ones((1, 2, 3, 8)), mx.ones((1, 2, 3, 8)))
    with pytest.raises(ValueError, match="5 tokens do not fit a cache of 4"):
        cache.update(mx.ones((1, 2, 2, 8)), mx.ones((1, 2, 2, 8)))
    with pytest.raises(ValueError, match="capacity=2 is less than the 3 tokens"):
        cache.resize(2)
    with pytest.raises(ValueError, match=r"length=4 is not in 0\.\.3"):
        cache.rewind(4)
    assert (cache.length, cache.capacity) == (3, 4)


@pytest.mark.parametrize("made", ["opt"], indirect=True)
def test_a_cache_that_does_not_fit_the_text_is_refused(made: Made) -> None:
    decoder = build(made.store.spec, resident(made.store), linear)
    caches = decoder.new_cache(8)
    with pytest.raises(ValueError, match="layer 1: the cache has 0 tokens, 3 come before these"):
        decoder.attend(1, decoder.embed(mx.array([5]), 3), caches[1], 3)


def test_a_cache_is_written_in_place() -> None:
    """One token more takes no second cache, whether it is filled or new."""
    cache, token = LayerCache(4, 4096, 64), mx.ones((1, 4, 1, 64))
    mx.eval(cache.update(token, token))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(3):
        keys, values = cache.update(token, token)
        mx.eval(mx.fast.scaled_dot_product_attention(token, keys, values, scale=1.0))
        del keys, values
    assert cache.nbytes == 2 * 4 * 4 * 4096 * 64
    assert mx.get_peak_memory() - before < cache.nbytes // 16
    for store in (cache.keys, cache.values):
        assert store is not None
        assert mx.array_equal(store[:, :, :4], mx.ones((1, 4, 4, 64)))
        assert not mx.any(store[:, :, 4:])


@some
def test_a_longer_text_compiles_nothing(made: Made) -> None:
    """Python's `linear` is called when a pass is traced, and by the head, which is not compiled."""
    weights, calls = resident(made.store), []

    def counted(x: Any, weight: Any, bias: Any) -> Any:
        calls.append(weight.shape)
        return linear(x, weight, bias)

    decoder, ffn = build(made.store.spec, weights, counted), dense_ffn(made.store, weights)
    caches = decoder.new_cache(24)
    logits(decoder, ffn, caches, [1])
    first = len(calls)
    assert first > 2
    for token in made.ids[1:].tolist():
        logits(decoder, ffn, caches, [token])
    assert len(calls) == first + 23


def test_a_decoder_gives_its_memory_back(tiny_opt: Path, tmp_path: Path) -> None:
    """Compiled functions hold no weights, and nothing else outlives the decoder."""
    store = convert(tiny_opt, tmp_path / "store")
    weights = ResidentWeights(store, StepClock(), in_place=True)
    decoder, ffn = build(store.spec, weights.arrays, linear), dense_ffn(store, weights.arrays)
    with FlashReader("threads") as reader:
        weights.make_resident(reader)
    logits(decoder, ffn, decoder.new_cache(8), [1])
    kept = weakref.ref(decoder)
    del decoder, ffn, weights
    gc.collect()
    assert kept() is None


def test_shared_bytes_are_one_memory() -> None:
    array, seen = shared_bytes(4096)
    assert seen.ctypes.data % PAGE == 0
    assert seen.flags.writeable
    part = array[64:192].view(mx.bfloat16).reshape(8, 8)
    mx.eval(part)
    assert not mx.any(part)
    seen[64:192] = np.full(64, 0x3F80, np.uint16).view(np.uint8)
    assert mx.array_equal(part, mx.ones((8, 8), mx.bfloat16))
    assert np.array(part.view(mx.uint16), copy=False).ctypes.data == seen.ctypes.data + 64


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_those_of_the_store(dtype: Any, in_place: bool, tiny_opt: Path, tmp_path: Path) -> None:
    store, clock = convert(tiny_opt, tmp_path / "store", dtype=dtype), StepClock()
    seen: list[tuple[str, int, int]] = []
    weights = ResidentWeights(store, clock, in_place)
    with FlashReader("threads") as reader, safe_open(store.resident_path, "pt") as wanted:
        weights.make_resident(reader, lambda *done: seen.append(done))
        total = sum(group.nbytes for group in store.groups)
        assert seen[-1] == ("resident weights", total, total)
        assert (len(seen), clock.read_bytes) == (len(store.groups), 0)
        for group in store.groups:
            check_group(weights, group, wanted)
        if in_place:
            for name, buffer in weights.buffers.items():
                buffer[:] = 0
                assert not any(mx.any(weights.arrays[tensor]) for tensor in store.group(name).tensors)
        weights.make_streamed()
        for group in store.groups:
            clock.begin()
            weights.load(reader, group.name)
            check_group(weights, group, wanted)
            assert clock.read_bytes == group.nbytes
            assert clock.reads == 1
            assert (clock.seconds["mem"] == 0.0) == in_place
        layers = [weights.buffers[f"layer.{i}"].ctypes.data for i in range(store.spec.num_layers)]
        assert len(set(layers)) == 1


def check_group(weights: ResidentWeights, group: Group, wanted: Any) -> None:
    for name, slot in group.tensors.items():
        array, tensor = weights.arrays[name], wanted.get_tensor(name)
        assert array.dtype == getattr(mx, slot.dtype)
        bits = torch.int32 if slot.dtype == "float32" else torch.int16
        assert array.shape == slot.shape == tuple(tensor.shape)
        assert np.array_equal(np.array(array.view(mx.int32 if bits == torch.int32 else mx.int16)), tensor.view(bits))


@pytest.mark.parametrize(("dtype", "in_place"), [("float16", True), ("bfloat16", False), ("bfloat16", True)])
@pytest.mark.parametrize("name", ["opt", "opt projected (350m)", "falcon 40b", "llama grouped queries", "phi tied"])
def test_streamed_16_bit_weights(name: str, dtype: Any, in_place: bool, tmp_path: Path) -> None:
    """Weights are rounded, arithmetic is not; layers follow each other through one buffer."""
    made = make(tmp_path, VARIANTS[name])
    rounded = made.reference
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
        wanted = rounded(made.ids[None]).logits[0]
    assert difference(wanted, made.logits) > 10 * TOLERANCE  # rounding shows
    store = convert(made.checkpoint, tmp_path / "rounded", dtype=dtype)
    weights, ids = ResidentWeights(store, StepClock(), in_place), made.ids.tolist()
    ffn = dense_ffn(store, resident(store))
    decoder = build(store.spec, weights.arrays, linear)
    with FlashReader("threads") as reader:
        weights.make_streamed()
        caches, got = decoder.new_cache(24), []
        for part in (ids[:20], *([i] for i in ids[20:])):
            offset = caches[0].length
            weights.load(reader, "embed")
            weights.load(reader, "head")
            h = decoder.embed(mx.array(part), offset)
            for layer, cache in enumerate(caches):
                mx.eval(h)
                weights.load(reader, f"layer.{layer}")
                h, x = decoder.attend(layer, h, cache, offset)
                h = decoder.join(layer, h, ffn(layer, x))
            got.append(torch.from_numpy(np.array(decoder.head(h))))
    assert difference(torch.cat(got), wanted) < TOLERANCE
