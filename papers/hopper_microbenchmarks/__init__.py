"""Hopper microbenchmarks (arXiv 2402.13499 and 2501.12084): claims, and the experiments that settle them."""
