"""A tiny real model, text for it, and a training run that takes a second or two."""

from __future__ import annotations

import json
import random
from pathlib import Path

from safetensors.torch import load_file, save_file
from tiny_models import make_opt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from workbench.capture.text import documents
from workbench.predictor.config import PredictorSpec

SPEC = PredictorSpec(
    rank=6,
    last_rank=10,
    last_layers=1,
    tokens=4096,
    sequence=32,
    batch_tokens=256,
    init_tokens=1024,
    validation_share=0.3,
    validation_tokens=1024,
)
LAYERS, D_MODEL, D_FF = 3, 32, 96


def write_text(path: Path) -> Path:
    """300 documents of random sentences in C4's layout."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(200)]
    texts = [" ".join(rng.choices(words, weights=range(200, 0, -1), k=60)) for _ in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_model(path: Path, text: Path) -> Path:
    """A random OPT with sparse FFNs and a byte-level tokenizer trained on the text."""
    make_opt(path, num_hidden_layers=LAYERS, hidden_size=D_MODEL, ffn_dim=D_FF, vocab_size=400)
    weights = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("fc1.bias"):
            tensor -= 0.35
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(path, text)
    return path


def write_tokenizer(path: Path, text: Path) -> None:
    """A byte-level tokenizer of 400 tokens beside a model."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel()  # type: ignore[assignment]
    words.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(documents(text), trainer)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(path)
