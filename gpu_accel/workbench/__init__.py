"""The workbench: run a paper's experiments, keep the results as records, and judge the paper's claims by them.

The modules here import neither torch nor triton, so that listing, reading and judging stay fast on any machine.
"""
