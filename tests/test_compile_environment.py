"""The processes that compile kernels without a GPU get the Triton that they ask for."""

from __future__ import annotations

import subprocess
import sys


def test_the_process_has_that_triton_and_compiles(request, compile_environment: dict[str, str]) -> None:
    wanted = request.node.callspec.params["compile_environment"]
    code = "import triton, gpu_accel; print(triton.__version__, triton.knobs.runtime.interpret)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=compile_environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    version, interpret = done.stdout.split()
    assert interpret == "False"
    assert wanted in ("installed", version)
