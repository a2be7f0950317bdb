"""Text in, activations of a dense model out."""
