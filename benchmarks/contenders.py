"""The programs that `side_by_side.py` compares, each alone in a process of its own: `contenders.py NAME REQUEST.json`.

Every one takes the same prompt and then the same tokens, one at a time, and reports the milliseconds of each. Nothing
of the workbench is imported but by its own contenders, so that others may run under another interpreter.
The last line is one JSON object.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "airllm", "llama-cpp-python", "gguf", "numpy")
OVERHEAD = 192 << 20
"""Bytes of ours over what its plan promises: a prompt's intermediate results, allocators, stacks, page tables."""
Logits = np.ndarray[Any, Any]
Step = Callable[[list[int]], Logits]
"""Takes tokens that follow those before; logits of the last one."""


class Refused(Exception):
    """A contender cannot run here; one line."""


def timed(step: Step, request: dict[str, Any]) -> dict[str, Any]:
    """The prompt, the warm-up and the counted tokens, with `choices`: the likeliest token after each counted one."""
    text, prompt, warm_up = request["text"], request["prompt"], request["warm_up"]
    began = time.perf_counter()
    step(text[:prompt])
    found: dict[str, Any] = {"prompt_ms": 1000 * (time.perf_counter() - began)}
    for token in text[prompt : prompt + warm_up]:
        step([token])
    times, choices, last = [], [], np.zeros(0)
    for token in text[prompt + warm_up :]:
        began = time.perf_counter()
        logits = step([token])
        times.append(1000 * (time.perf_counter() - began))
        choices.append(int(np.argmax(logits)))
        last = logits
    some = last[:: max(1, len(last) // 64)].tolist()
    return {**found, "ms": times, "choices": choices, "last_logits": some, **resident_bytes()}


# Hugging Face transformers


def _stepper(model: Any) -> Step:
    """A model of transformers that keeps its keys and values."""
    import torch
    from transformers import DynamicCache

    taken = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    cache = {"cache" if "cache" in taken else "past_key_values": DynamicCache(config=model.config)}

    def step(tokens: list[int]) -> Logits:
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([tokens]), use_cache=True, logits_to_keep=1, **cache)
        return out.logits[0, -1].float().numpy()

    return step


def _loaded(request: dict[str, Any], **options: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(request["threads"])
    return AutoModelForCausalLM.from_pretrained(request["checkpoint"], dtype="auto", **options).eval()


def dense(request: dict[str, Any]) -> dict[str, Any]:
    """All weights in memory of the process itself, none of them pages of the file."""
    import torch

    model = _loaded(request)
    seen: dict[int, torch.Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = seen.setdefault(tensor.data_ptr(), tensor.data.clone())
    return timed(_stepper(model), request)


def mapped(request: dict[str, Any]) -> dict[str, Any]:
    """All weights mapped from the checkpoint's files, no copy: the page cache decides what stays."""
    import torch
    from accelerate import init_empty_weights
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(request["threads"])
    config = AutoConfig.from_pretrained(request["checkpoint"])
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    state: dict[str, torch.Tensor] = {}
    for file in sorted(Path(request["checkpoint"]).glob("*.safetensors")):
        state |= load_file(file)
    missing = model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    left = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if left or missing.unexpected_keys:
        raise Refused(f"{request['checkpoint']}: {(left + missing.unexpected_keys)[0]} does not match the model")
    return timed(_stepper(model.eval()), request)


def accelerate(request: dict[str, Any]) -> dict[str, Any]:
    """accelerate's disk offload of all modules, as from_pretrained sets it up."""
    return _offloaded(request, {"device_map": {"": "disk"}})


def accelerate_auto(request: dict[str, Any]) -> dict[str, Any]:
    """The same with as many modules in DRAM as `accelerate_bytes` holds."""
    return _offloaded(request, {"device_map": "auto", "max_memory": {"cpu": request["accelerate_bytes"]}})


def _offloaded(request: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    model = _loaded(request, offload_folder=str(Path(request["work"]) / "offload"), **where)
    places = list(getattr(model, "hf_device_map", {}).values())
    found = {"modules_on_disk": sum(place == "disk" for place in places), "modules": len(places)}
    return {**timed(_stepper(model), request), **found}


def airllm(request: dict[str, Any]) -> dict[str, Any]:
    """AirLLM, which splits the checkpoint by layer and reads every layer for every token. It is told the names of
    OPT's layers, which it does not know."""
    import torch
    from airllm.airllm_base import AirLLMBaseModel  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(request["threads"])

    class Opt(AirLLMBaseModel):
        def set_layer_names_dict(self) -> None:
            self.layer_names_dict = {
                "embed": "model.decoder.embed_tokens", "layer_prefix": "model.decoder.layers",
                "norm": "model.decoder.final_layer_norm", "lm_head": "lm_head",
                "resident": ["model.decoder.embed_positions"],
            }  # fmt: skip

    kind = Opt if request["model_type"] == "opt" else AirLLMBaseModel
    dtype = getattr(torch, request["dtype"])
    shards = Path(request["work"]) / "airllm"
    model = kind(request["checkpoint"], device="cpu", dtype=dtype, layer_shards_saving_path=str(shards))
    return timed(_stepper(model.model), request)


# llama.cpp


def llama_cpp(request: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp with mmap, through the C functions of llama-cpp-python. It computes SiLU where the model has ReLU: the
    same bytes and the same time, but other tokens."""
    try:
        import llama_cpp as ll  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Refused(f"llama-cpp-python is not installed ({error})") from error
    ll.llama_backend_init()
    options = ll.llama_model_default_params()
    options.use_mmap, options.n_gpu_layers = True, 0
    model = ll.llama_model_load_from_file(request["gguf"].encode(), options)
    if not model:
        raise Refused(f"{request['gguf']}: llama.cpp does not load it")
    settings = ll.llama_context_default_params()
    settings.n_ctx, settings.n_batch = max(64, len(request["text"])), max(64, request["prompt"])
    settings.n_threads = settings.n_threads_batch = request["threads"]
    context = ll.llama_init_from_model(model, settings)
    vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))

    def step(tokens: list[int]) -> Logits:
        array = (ll.llama_token * len(tokens))(*tokens)
        if ll.llama_decode(context, ll.llama_batch_get_one(array, len(tokens))):
            raise Refused("llama_decode failed")
        logits = ctypes.cast(ll.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(logits, (vocabulary,)).copy()

    return {**timed(step, request), "choices": None}


# ours


def _ours(request: dict[str, Any], dram: str, **techniques: Any) -> dict[str, Any]:
    import dataclasses

    from workbench.ablation import PAPER_ROWS
    from workbench.engines import open_engine
    from workbench.flash.store import Store
    from workbench.predictor.low_rank import Predictors
    from workbench.spec import RunSpec

    row = techniques.pop("row", "+ bundling (all)")
    window = techniques.pop("window", request["window"])
    ablation = dataclasses.replace(PAPER_ROWS[row], **techniques)
    store, predictors = Store.open(request["store"]), Predictors.load(request["predictors"])
    run = RunSpec(window=window, dram=dram, context=len(request["text"]), compute_threads=request["threads"])
    with open_engine(store, ablation, predictors, run) as engine:
        counted: list[Any] = []

        def step(tokens: list[int]) -> Logits:
            logits, stats = engine.prefill(tokens) if len(tokens) > 1 else engine.step(tokens[0])
            counted.append(stats)
            return logits.numpy()

        found = timed(step, request)
        planned = engine.plan.total
    steps = counted[1 + request["warm_up"] :]

    def mean(name: str) -> float:
        return float(np.mean([getattr(each, name) for each in steps]))

    ffn = store.spec.ffn_neurons
    parts = {f"{part}_ms": float(np.median([getattr(s, f"{part}_ms") for s in steps]))
             for part in ("io", "mem", "compute", "predictor")}  # fmt: skip
    return {
        **found, **parts, "dram": dram, "dram_bytes": planned, "window": window, "flash_bytes": mean("read_bytes"),
        "new_share": mean("loaded") / ffn, "kept_share": mean("in_window") / ffn,
        "predicted_share": mean("predicted") / ffn, "active_share": mean("active") / ffn,
        "window_trims": sum(s.window_trims for s in steps), "ablation": dataclasses.asdict(ablation),
    }  # fmt: skip


def _within_limit(request: dict[str, Any]) -> str:
    """The budget that the memory limit leaves to the plan: all but what the process holds before it begins."""
    from workbench.engines.budget import process_rss

    if request["limit"] is None:
        return "100%"
    return f"{request['limit'] - process_rss() - OVERHEAD}B"


def everything(request: dict[str, Any]) -> dict[str, Any]:
    """The paper's 'all' in what the limit allows."""
    return _ours(request, _imported(request))


def _imported(request: dict[str, Any]) -> str:
    """`_within_limit` once all that a run imports is there."""
    import workbench.engines.torch_cpu  # noqa: F401

    return _within_limit(request)


def coalesced(request: dict[str, Any]) -> dict[str, Any]:
    """'all' with near reads merged."""
    return _ours(request, _imported(request), coalesce=True)


def prefetched(request: dict[str, Any]) -> dict[str, Any]:
    """'all' that reads for the next layer while a layer computes."""
    return _ours(request, _imported(request), prefetch=True)


def naive(request: dict[str, Any]) -> dict[str, Any]:
    """Our engine that reads the whole model for each token."""
    return _ours(request, _imported(request), row="naive", window=0)


def half(request: dict[str, Any]) -> dict[str, Any]:
    """'all' in half of the model's bytes, beside what the process held before it began: that is its limit."""
    import workbench.engines.torch_cpu  # noqa: F401
    from workbench.flash.store import Store

    group, planned = Path(request["group"]), Store.open(request["store"]).model_bytes // 2
    limit = int((group / "memory.usage_in_bytes").read_text()) + OVERHEAD + planned
    (group / "memory.limit_in_bytes").write_text(str(limit))
    return {**_ours(request, "50%", window=request["half_window"]), "limit_bytes": limit}


def oracle(request: dict[str, Any]) -> dict[str, Any]:
    """The store with the true activations, whose tokens are to be the dense model's."""
    return _ours(request, "100%", predictor="oracle")


CONTENDERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "dense": dense, "oracle": oracle, "all": everything, "all + coalesce": coalesced, "all + prefetch": prefetched,
    "all, half": half, "naive": naive, "mmap": mapped, "accelerate": accelerate,
    "accelerate, auto": accelerate_auto, "airllm": airllm, "llama.cpp": llama_cpp,
}  # fmt: skip


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def resident_bytes() -> dict[str, int]:
    """What the process holds now, of its own (anonymous) and of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    named = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return {"anonymous_bytes": 1024 * int(named["RssAnon"]), "file_bytes": 1024 * int(named["RssFile"])}


def main() -> int:
    name, request = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        found = CONTENDERS[name](request)
    except Exception as error:  # whatever a foreign package raises becomes one line of the record
        line = " ".join(str(error).split()) or type(error).__name__
        print(json.dumps({"failed": f"{type(error).__name__}: {line}"[:300], "versions": versions()}))
        return 1
    print(json.dumps({**found, "versions": versions()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
