"""Fixtures that several test modules share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import make_opt


@pytest.fixture(scope="session")
def tiny_opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random OPT checkpoint: 2 layers, d_model 64, d_ff 256, vocab 128, float32. Do not change it."""
    return make_opt(tmp_path_factory.mktemp("tiny") / "tiny-opt")
