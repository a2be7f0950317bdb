"""Text sampled from a larger language model, to train the demo model on.

Two kinds of prompt: the first tokens of real web sentences, which the teacher continues, and requests
for short stories and explanations, which give plainer English than the web does. Written in C4's
layout (one JSON object a line: text, timestamp, url).
"""

from __future__ import annotations

import datetime
import gzip
import itertools
import json
import random
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

REQUESTS = (
    "Write a short story for children about {a} and {b}.",
    "Tell a simple story about {a} who met {b}.",
    "Explain in plain words what {a} has to do with {b}.",
    "Describe a day in the life of {a} near {b}.",
    "Write a friendly letter about {a} and {b}.",
    "Give a short lesson about {a} and {b}.",
)
THINGS = (
    "a farmer", "a small dog", "the sea", "an old teacher", "a red bicycle", "the moon", "a young girl",
    "a river", "a kind doctor", "winter", "a brave sailor", "bread", "a music school", "an honest king",
    "the forest", "a train", "a grandmother", "a garden", "a tired baker", "the city", "a painter",
    "a lost key", "a clever fox", "rain", "a village market", "a tall mountain", "the library", "a boat",
    "a busy nurse", "a cat", "an apple tree", "a bridge", "a quiet boy", "the stars", "a team of builders",
    "good food", "a wooden house", "a letter", "the summer", "a bird",
)  # fmt: skip


def load_teacher(path: Path, device: str) -> tuple[Any, Any]:
    """A causal language model in bfloat16 and its tokenizer, from a GGUF file or a checkpoint directory."""
    where: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    source = str(path.parent if where else path)
    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **where)
    return model.to(device).eval(), tokenizer


def web_prompts(documents: Iterable[str], tokenizer: Any, length: int, rng: random.Random) -> Iterator[list[int]]:
    """The first `length` tokens of sentences of real documents, shuffled, again and again."""
    found: list[list[int]] = []
    for text in documents:
        for sentence in re.split(r"(?<=[.!?])\s+|\n", text):
            if len(sentence) > 60 and sentence[0].isupper():
                ids = tokenizer(sentence[:200], add_special_tokens=False)["input_ids"]
                if len(ids) >= length:
                    found.append(ids[:length])
    while found:
        rng.shuffle(found)
        yield from found


def request_prompts(tokenizer: Any, rng: random.Random) -> dict[int, list[list[int]]]:
    """Chat prompts by their length in tokens, so that a batch needs no padding."""
    by_length: dict[int, list[list[int]]] = {}
    for template, a, b in itertools.product(REQUESTS, THINGS, THINGS):
        if a != b:
            text = f"<|im_start|>user\n{template.format(a=a, b=b)}<|im_end|>\n<|im_start|>assistant\n"
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            by_length.setdefault(len(ids), []).append(ids)
    for prompts in by_length.values():
        rng.shuffle(prompts)
    return by_length


@torch.no_grad()
def sample(model: Any, prompts: torch.Tensor, new_tokens: int, temperature: float, top_k: int) -> torch.Tensor:
    """Continue `prompts` [B, P] by `new_tokens`, each drawn from the `top_k` likeliest. Returns [B, P + new]."""
    cache, ids, out = DynamicCache(config=model.config), prompts, [prompts]
    for _ in range(new_tokens):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        values, index = logits.topk(top_k)
        ids = index.gather(1, torch.multinomial((values / temperature).softmax(-1), 1))
        out.append(ids)
    return torch.cat(out, 1)


def generate(
    teacher: Path,
    prompts: Iterable[str],
    out: Path,
    *,
    seconds: float,
    batch: int = 2048,
    length: int = 512,
    temperature: float = 0.8,
    top_k: int = 50,
    device: str = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    """Sample passages for about `seconds` and write them to `out`; returns what was written, for the card."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model, tokenizer = load_teacher(teacher, device)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    web = web_prompts(prompts, tokenizer, 16, rng)
    requests = request_prompts(tokenizer, rng)
    lengths = sorted(requests, key=lambda n: -len(requests[n]))[:4]
    began, spent, tokens, passages = time.monotonic(), 0.0, 0, 0
    with gzip.open(out, "wt", encoding="utf-8", compresslevel=5) as file:
        for turn in itertools.count():
            # two batches of requests to one of the web: the demo model has to write plain sentences
            if turn % 3 == 0:
                kind, chosen, hide = "web", list(itertools.islice(web, batch)), 0
            else:
                pool = requests[lengths[turn % len(lengths)]]
                kind, chosen = "request", [pool[rng.randrange(len(pool))] for _ in range(batch)]
                hide = len(chosen[0])
            rows = sample(model, torch.tensor(chosen, device=device), length - len(chosen[0]), temperature, top_k)
            texts = tokenizer.batch_decode([_until(r, end, hide) for r in rows.tolist()], skip_special_tokens=True)
            for text in filter(None, map(str.strip, texts)):
                line = {"text": text, "timestamp": stamp, "url": f"generated:{kind}/{passages}"}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                passages += 1
            tokens += rows.numel()
            spent = time.monotonic() - began
            print(
                f"teacher: {passages} passages, {tokens / 1e6:.1f}M tokens, {tokens / spent:.0f} tokens/s", flush=True
            )
            if spent * (turn + 2) / (turn + 1) > seconds:  # one more batch would pass the limit
                break
    return {
        "teacher": teacher.name, "passages": passages, "teacher_tokens": tokens, "temperature": temperature,
        "top_k": top_k, "seconds": round(spent, 1), "seed": seed,
    }  # fmt: skip


def _until(ids: list[int], end: int, hide: int) -> list[int]:
    """What follows the first `hide` tokens, up to the end token."""
    ids = ids[hide:]
    return ids[: ids.index(end)] if end in ids else ids
