"""CPU kernels: 32-bit arithmetic over weights stored in 16 or 32 bits, each beside a plain numpy reference."""
