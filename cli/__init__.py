"""The command line: parse, call gpu_accel.workbench, render. Installed as gpu_accel_cli."""
