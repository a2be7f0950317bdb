"""DRAM: the neuron window and the slots that hold its neurons (paper, sections 3.1 and 3.3)."""
