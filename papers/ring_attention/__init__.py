"""Ring Attention (arXiv 2310.01889) and its relatives: their claims, and the experiments that settle them."""
