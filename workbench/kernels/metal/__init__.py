"""GPU kernels: each a Metal body, written once, with the machines that run it (docs/kernels.md)."""
