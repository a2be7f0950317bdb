"""A model whose FFN is not sparse becomes one with ReLU, by distillation from the original."""

from workbench.relufy.config import RelufySpec
from workbench.relufy.run import relufy

__all__ = ["RelufySpec", "relufy"]
