"""FP8, MX and NVFP4: claims and experiments."""
