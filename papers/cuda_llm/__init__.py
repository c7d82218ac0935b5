"""CUDA-LLM (arXiv 2506.09092): its claims, and the experiments on kernel search and on its harness."""
