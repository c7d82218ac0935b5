"""What the sandboxed process does with host code: import it, call it, write raw outputs. See host.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def _module(folder: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _write(folder: Path, number: int, found: Any) -> list[dict[str, Any]]:
    """Outputs as raw bytes; only plain tensors are outputs."""
    import torch

    listed = list(found) if isinstance(found, tuple | list) else [found]
    told = []
    with (folder / f"out{number}.bin").open("wb") as file:
        for x in listed:
            if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
                raise TypeError(f"an output is a {type(x).__name__}, not a tensor")
            x = x.detach().cpu().contiguous()
            told.append({"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")})
            file.write(x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return told


def host(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Call the candidate's entry on every set of inputs."""
    import torch

    module = _module(folder, "candidate")
    name = next((one for one in job["entries"] if hasattr(module, one)), "")
    if not name:
        raise NameError(f"the file defines none of {', '.join(job['entries'])}")
    entry, outputs = getattr(module, name), []
    for number, described in enumerate(job["sets"]):
        data, at, inputs = bytearray((folder / f"in{number}.bin").read_bytes()), 0, []
        for one in described:
            x = torch.empty(one["shape"], dtype=getattr(torch, one["dtype"]))
            size = x.numel() * x.element_size()
            if size:
                x = torch.frombuffer(data, dtype=x.dtype, count=x.numel(), offset=at).reshape(one["shape"]).clone()
            inputs.append(x.to(job["device"]))
            at += size
        outputs.append(_write(folder, number, entry(tuple(inputs)) if name == "custom_kernel" else entry(*inputs)))
    return {"outputs": outputs}


def model(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A KernelBench problem in float64 and in its own dtypes, or an answer to it."""
    import torch

    problem = _module(folder, "problem")
    torch.manual_seed(job["seed"])
    arguments = problem.get_init_inputs()
    torch.manual_seed(job["seed"] + 1)
    inputs = [x.to(job["device"]) if isinstance(x, torch.Tensor) else x for x in problem.get_inputs()]
    torch.manual_seed(job["seed"] + 2)
    own = problem.Model(*arguments).to(job["device"])
    with torch.no_grad():
        if not job["answer"]:
            kept = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
            plain = own(*inputs)
            wide = own.double()(*(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                                  for x in kept))  # fmt: skip
            both = [one for result in (wide, plain) for one in (result if isinstance(result, tuple) else (result,))]
            return {"outputs": [_write(folder, 0, both)]}
        candidate = _module(folder, "candidate")
        torch.manual_seed(job["seed"] + 2)
        answer = candidate.ModelNew(*arguments).to(job["device"])
        weights = own.state_dict()
        if set(weights) == set(answer.state_dict()):
            answer.load_state_dict(weights)
        del own, problem
        return {"outputs": [_write(folder, 0, answer(*inputs))]}
