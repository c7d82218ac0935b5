"""Cores of NVIDIA GPUs (arXiv 2503.20481): its claims; its experiments are those of the Hopper paper."""
