"""The engine `torch-cuda`: resident weights, slots and arithmetic on an NVIDIA card, through torch."""
