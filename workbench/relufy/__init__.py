"""ReLU for models that are not sparse: swap the activation, distil from the original, measure both."""
