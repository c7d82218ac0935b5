"""Papers turned into claims and experiments: one folder each, found by `gpu_accel.workbench.registry`."""
