"""Sparsity, reuse and co-activation as plain array functions."""
