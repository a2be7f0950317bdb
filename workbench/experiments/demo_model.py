"""Train the demo model: a small OPT whose feed-forward activations are sparse under ReLU.

    python -m workbench.experiments.demo_model --text DIR_OR_FILE --teacher MODEL.gguf \\
        --prompts C4.json.gz --held-out C4.json.gz --out data/demo-model

The text is what the teacher wrote (given with --text, and more of it sampled here). The loss is
next-token cross-entropy plus an L1 term on the activations, each scaled by the norm of its down
column so that the term cannot be evaded by shrinking one matrix and growing the other; its weight
is controlled to hold a stated share of active neurons. Written: float16 safetensors, tokenizer,
card.json and CARD.md, and the held-out part of the generated text as the embedded corpus.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from workbench.capture.text import documents
from workbench.experiments import teacher_text
from workbench.training.sparsity import SparsityControl

HELD_OUT_DOCUMENTS = 200
EMBEDDED_BYTES = 2_500_000


class PenalisedReLU(nn.Module):
    """ReLU that keeps, of its last call, the L1 penalty and the share of active neurons."""

    def __init__(self, down: nn.Linear):
        super().__init__()
        self.down = [down]  # in a list: the parameter belongs to the layer, not to this module
        self.penalty = self.active = torch.zeros(())

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        h = F.relu(z)
        self.penalty = (h.float().mean(tuple(range(h.dim() - 1))) * self.down[0].weight.float().norm(dim=0)).sum()
        self.active = (h > 0).float().mean().detach()
        return h


def train_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `vocab` entries; like OPT's, it begins each text with `</s>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="</s>", eos_token="</s>", pad_token="<pad>", model_max_length=512
    )


def pack(texts: list[str], tokenizer: Any) -> np.ndarray:
    """All texts one after the other, each after `</s>`, as uint16 token ids."""
    parts = []
    for at in range(0, len(texts), 4096):
        encoded = tokenizer._tokenizer.encode_batch(texts[at : at + 4096])
        parts += [np.asarray(e.ids, np.uint16) for e in encoded]
    return np.concatenate(parts)


def demo_config(vocab: int) -> OPTConfig:
    return OPTConfig(
        vocab_size=vocab, hidden_size=512, word_embed_proj_dim=512, ffn_dim=2048, num_hidden_layers=6,
        num_attention_heads=8, max_position_embeddings=512, dropout=0.0, activation_function="relu",
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


def learning_rate(step: int, steps: int, peak: float, warmup: int = 200) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def train(model: Any, ids: np.ndarray, args: argparse.Namespace) -> dict[str, Any]:
    """Train in place; returns the steps, the loss curve and the settings."""
    device, length, batch = args.device, 512, args.batch
    relus = [PenalisedReLU(layer.fc2) for layer in model.model.decoder.layers]
    for layer, relu in zip(model.model.decoder.layers, relus, strict=True):
        layer.activation_fn = relu
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device == "cuda")
    data = torch.from_numpy(ids.astype(np.int32)).to(device)
    rng = np.random.default_rng(args.seed)
    control, curve, active, steps, weight = SparsityControl(args.active), [], 1.0, args.steps or 10**9, 0.0
    probe, step = 60, 0
    began = mark = time.monotonic()
    while step < steps:
        if step == probe and not args.steps:  # the speed is known now: fix the number of steps
            steps = probe + int(
                (args.train_seconds - (time.monotonic() - began)) * 0.9 * 40 / (time.monotonic() - mark)
            )
        if step == 20:
            mark = time.monotonic()
        starts = torch.from_numpy(rng.integers(0, len(data) - length - 1, batch)).to(device)
        window = data[starts[:, None] + torch.arange(length + 1, device=device)].long()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, args.lr)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(window[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        penalty = torch.stack([r.penalty for r in relus]).mean()
        (loss + weight * penalty).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:  # reading values back stops the GPU: not at every step
            active = float(torch.stack([r.active for r in relus]).mean())
            for _ in range(10):
                weight = control.step(step / steps, active)
        if step % 50 == 0 or step == steps - 1:
            curve.append({"step": step, "loss": round(loss.item(), 4), "active": round(active, 4), "l1": weight})
            print(
                f"step {step}/{steps if steps < 10**9 else '?'} {curve[-1]} {time.monotonic() - began:.0f}s", flush=True
            )
        step += 1
    for layer in model.model.decoder.layers:
        layer.activation_fn = nn.ReLU()
    return {
        "steps": steps, "tokens_seen": steps * batch * length, "seconds": round(time.monotonic() - began, 1),
        "optimizer": f"AdamW, peak {args.lr}, cosine, batch {batch} x {length}", "l1_final": control.weight,
        "active_target": args.active, "curve": curve,
    }  # fmt: skip


@torch.no_grad()
def measure(model: Any, tokenizer: Any, texts: list[str]) -> dict[str, Any]:
    """Perplexity (a token, and bits a byte) and the zeros of each layer, on windows of 512 tokens."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(pack(texts, tokenizer).astype(np.int64))
    windows = ids[: len(ids) // 512 * 512].view(-1, 512)
    zeros = [0.0] * len(model.model.decoder.layers)
    fired = [torch.zeros(layer.fc1.out_features, device=device) for layer in model.model.decoder.layers]

    def count(index: int) -> Any:
        def hook(module: nn.Module, inputs: Any, z: torch.Tensor) -> None:
            on = (z > 0).float().flatten(0, -2)
            zeros[index] += float((1 - on).mean()) * len(on)
            fired[index] += on.sum(0)

        return hook

    hooks = [layer.fc1.register_forward_hook(count(i)) for i, layer in enumerate(model.model.decoder.layers)]
    total = 0.0
    for at in range(0, len(windows), 16):
        rows = windows[at : at + 16].to(device)
        logits = model(rows).logits.float()
        total += float(F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"))
    for hook in hooks:
        hook.remove()
    predicted = windows.shape[0] * 511
    share_of_bytes = sum(len(t.encode()) for t in texts) / len(ids)
    return {
        "documents": len(texts), "windows": windows.shape[0], "perplexity": round(math.exp(total / predicted), 3),
        "bits_per_byte": round(total / predicted / math.log(2) / share_of_bytes, 4),
        "zeros_by_layer": [round(z / windows.numel(), 4) for z in zeros],
        "never_active_by_layer": [round(float((f == 0).float().mean()), 4) for f in fired],
    }  # fmt: skip


@torch.no_grad()
def samples(model: Any, tokenizer: Any, seed: int) -> list[str]:
    device = next(model.parameters()).device
    torch.manual_seed(seed)
    prompts = [
        "Once upon a time",
        "The farmer walked to the market and",
        "Bread is",
        "It was raining when the old teacher",
    ]
    out = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(device)
        row = model.generate(ids, max_new_tokens=80, do_sample=True, temperature=0.7, top_p=0.9)
        out.append(tokenizer.decode(row[0], skip_special_tokens=True))
    return out


def card_text(card: dict[str, Any]) -> str:
    c4, own, text, trained = card["c4"], card["generated"], card["text"], card["training"]
    here = text["sampled_here"]
    layers = zip(own["zeros_by_layer"], c4["zeros_by_layer"], c4["never_active_by_layer"], strict=True)
    lines = [
        "# Demo model\n",
        f"An OPT decoder ({card['parameters'] / 1e6:.1f}M parameters: 6 layers, d_model 512, FFN 2048, 8 heads,",
        f"vocabulary {card['vocab']}), trained from nothing by `python -m workbench.experiments.demo_model` on",
        f"{card['device']}. It exists to be small, real and sparse.\n",
        f"- Text: {text['passages']} passages, {text['tokens'] / 1e6:.1f}M tokens, all sampled from",
        f"  SmolLM2-135M-Instruct (Apache-2.0); {here['passages']} of them by this recipe (temperature",
        f"  {here['temperature']}, top-k {here['top_k']}).",
        f"- Training: {trained['steps']} steps, {trained['tokens_seen'] / 1e6:.0f}M tokens seen,",
        f"  {trained['seconds']:.0f} s; {trained['optimizer']}.",
        "- An L1 term on the activations, each times the norm of its down column, its weight controlled to hold",
        f"  {100 * trained['active_target']:.0f}% active.",
        f"- Perplexity on {c4['documents']} C4 documents, of which it saw none: {c4['perplexity']} a token",
        f"  ({c4['bits_per_byte']} bits a byte).",
        f"- Perplexity on held-out generated text (the corpus shipped beside it): {own['perplexity']} a token",
        f"  ({own['bits_per_byte']} bits a byte).\n",
        "| layer | zeros, generated text | zeros, C4 | never active on C4 |",
        "| --- | --- | --- | --- |",
        *(f"| {i} | {100 * a:.1f}% | {100 * b:.1f}% | {100 * c:.1f}% |" for i, (a, b, c) in enumerate(layers)),
        "\n| step | loss | active |",
        "| --- | --- | --- |",
        *(f"| {c['step']} | {c['loss']:.3f} | {100 * c['active']:.1f}% |" for c in trained["curve"][::10]),
        "\nSamples (temperature 0.7, top-p 0.9):\n",
        "\n\n".join("> " + sample.replace("\n", "\n> ") for sample in card["samples"]),
    ]
    return "\n".join(lines) + "\n"


def write_corpus(texts: list[str], out: Path, stamp: str) -> int:
    """The embedded corpus in C4's layout and file names; returns its bytes of text."""
    size = 0
    out.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(out / "c4-train.00000-of-00001.json.gz", "wb", mtime=0) as file:
        for i, text in enumerate(texts):
            line = {"text": text, "timestamp": stamp, "url": f"generated:{i}"}
            file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
            size += len(text.encode())
    return size


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workbench.experiments.demo_model", description=__doc__)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="text that the teacher wrote before")
    parser.add_argument("--teacher", type=Path, required=True, help="GGUF file or checkpoint directory")
    parser.add_argument("--prompts", type=Path, required=True, help="real text whose sentences are continued")
    parser.add_argument(
        "--held-out", type=Path, required=True, help="real text; its first 200 documents are measured on"
    )
    parser.add_argument("--out", type=Path, default=Path("data/demo-model"))
    parser.add_argument("--corpus", type=Path, default=Path("data/text"))
    parser.add_argument("--work", type=Path, default=Path("runs/demo-model"), help="where the sampled text is kept")
    parser.add_argument("--teacher-seconds", type=float, default=210)
    parser.add_argument("--teacher-batch", type=int, default=2048)
    parser.add_argument("--train-seconds", type=float, default=260)
    parser.add_argument("--steps", type=int, default=0, help="instead of --train-seconds")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--active", type=float, default=0.05, help="share of neurons to be active")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    sampled = args.work / "sampled.json.gz"
    if not sampled.exists():
        prompts = islice(documents(args.prompts), HELD_OUT_DOCUMENTS, None)
        made = teacher_text.generate(
            args.teacher, prompts, args.work / "sampled.partial", seconds=args.teacher_seconds,
            batch=args.teacher_batch, device=args.device, seed=args.seed,
        )  # fmt: skip
        (args.work / "sampled.json").write_text(json.dumps(made))
        (args.work / "sampled.partial").rename(sampled)
    made = json.loads((args.work / "sampled.json").read_text())
    rng = random.Random(args.seed)
    texts = [text for path in args.text for text in documents(path)]
    new = list(documents(sampled))
    rng.shuffle(new)
    embedded, size = [], 0
    while size < EMBEDDED_BYTES and len(embedded) < len(new) // 4:
        embedded.append(new[len(embedded)])
        size += len(embedded[-1].encode())
    texts += new[len(embedded) :]
    rng.shuffle(texts)
    tokenizer = train_tokenizer(texts[:: max(1, len(texts) // 20000)], args.vocab)
    ids = pack(texts, tokenizer)
    print(f"text: {len(texts)} passages, {len(ids) / 1e6:.1f}M tokens", flush=True)
    torch.manual_seed(args.seed)
    model = OPTForCausalLM(demo_config(len(tokenizer))).to(args.device)
    training = train(model, ids, args)
    model = model.half().float().eval()  # measured as it is shipped
    with gzip.open(sampled, "rt", encoding="utf-8") as file:
        stamp = json.loads(next(file))["timestamp"]
    write_corpus(embedded, args.corpus, stamp)
    card = {
        "parameters": sum(p.numel() for p in model.parameters()), "vocab": len(tokenizer), "seed": args.seed,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "text": {"passages": len(texts), "tokens": len(ids), "sampled_here": made}, "training": training,
        "c4": measure(model, tokenizer, list(islice(documents(args.held_out), HELD_OUT_DOCUMENTS))),
        "generated": measure(model, tokenizer, embedded), "samples": samples(model, tokenizer, args.seed),
    }  # fmt: skip
    model.half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (args.out / "CARD.md").write_text(card_text(card))
    print(card_text(card))


if __name__ == "__main__":
    main()
