"""The engine `mlx`: decoders in MLX around FFNs that run from flash, on Apple's GPU, on CUDA or on the CPU.

MLX is an optional dependency (the extra `mlx`): nothing here imports it before it is used.
"""
