"""FlashAttention-3 (arXiv 2407.08608): its claims, and the experiments that settle them."""
