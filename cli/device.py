"""Which device a run uses, decided before anything imports Triton.

Triton's decorators look at TRITON_INTERPRET when a kernel's module is imported, so without a GPU the variable has to be
set first; then the very same kernels run in Triton's interpreter on CPU tensors.
"""

from __future__ import annotations

import os

from gpu_accel.errors import HardwareError


def prepare(asked: str) -> str:
    """The device for `asked` ("auto", "cpu", "cuda", "cuda:N"): "cpu", where kernels will be interpreted, or "cuda".

    Raises:
        InvalidInputError: another word.
        HardwareError: a GPU was asked for and there is none.
    """
    from gpu_accel.workbench.host import resolve_device

    try:
        device = resolve_device(asked)
    except HardwareError as error:
        raise HardwareError(f"{error}; `gpu-accel doctor` says what stands in the way") from error
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    return device
