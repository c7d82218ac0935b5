"""Blackwell microbenchmarks (arXiv 2507.10789 and 2512.02189): claims, and what of them can be settled on Hopper."""
