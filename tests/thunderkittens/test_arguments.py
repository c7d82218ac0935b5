"""What kernels would read as somebody else's memory, or as another number, is refused before they run."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gpu_accel.thunderkittens as tk
from gpu_accel.errors import InvalidInputError
from tests.thunderkittens.helpers import randn

Q = torch.ones(1, 12, 2, 16)
ONES = torch.ones(1, 12, 2)


def packed(*ends: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ends, dtype=dtype)


PACKED = {
    "linear": lambda cu: tk.chunk_linear_attn(Q, Q, Q, cu_seqlens=cu),
    "gla": lambda cu: tk.chunk_simple_gla(Q, Q, Q, cu_seqlens=cu, backend="portable"),
    "retention": lambda cu: tk.chunk_retention(Q, Q, Q, cu_seqlens=cu),
    "delta": lambda cu: tk.chunk_delta_rule(Q, Q, Q, ONES, cu_seqlens=cu, backend="portable"),
    "based": lambda cu: tk.fused_chunk_based(Q, Q, Q, cu_seqlens=cu),
}


@pytest.mark.parametrize("call", PACKED.values(), ids=PACKED)
def test_offsets_that_leave_the_rows(call):
    for ends, message in [
        ((0, 8, 40), "only 12 rows"), ((0, -4, 12), "not decrease"), ((0, 8, 4, 12), "not decrease"),
        ((2, 12), "start with 0"),
    ]:  # fmt: skip
        with pytest.raises(InvalidInputError, match=message):
            call(packed(*ends))
    for wrong in (packed(0, 12).bool(), packed(0, 12).float(), [0, 12], packed(0, 12).to("meta"), packed(0, 12)[None]):
        with pytest.raises(InvalidInputError, match="cu_seqlens"):
            call(wrong)


def test_offsets_of_another_stride(device):
    q, k, v = (randn(1, 12, 2, 16, seed=n, device=device) for n in range(3))
    beta = randn(1, 12, 2, seed=4, device=device).sigmoid()
    cu = torch.tensor([[0, 99], [5, 99], [12, 99]], dtype=torch.int32, device=device)[:, 0]
    for call in (
        lambda cu: tk.chunk_simple_gla(q, k, v, -beta, cu_seqlens=cu, output_final_state=True, backend="portable"),
        lambda cu: tk.chunk_gated_delta_rule(
            q, k, v, -beta, beta, cu_seqlens=cu, output_final_state=True, backend="portable"
        ),
    ):
        for one, other in zip(call(cu), call(cu.contiguous()), strict=True):
            assert torch.equal(one, other)


WRONG = {
    "list": lambda: tk.chunk_simple_gla(Q.tolist(), Q, Q),
    "none": lambda: tk.chunk_linear_attn(Q, None, Q),
    "scalar-q": lambda: tk.chunk_linear_attn(torch.ones(()), Q, Q),
    "vector-v": lambda: tk.chunk_retention(Q, Q, torch.ones(3)),
    "integer-g": lambda: tk.chunk_simple_gla(Q, Q, Q, ONES.int()),
    "g-elsewhere": lambda: tk.chunk_simple_gla(Q, Q, Q, ONES.to("meta")),
    "boolean-beta": lambda: tk.chunk_delta_rule(Q, Q, Q, ONES.bool()),
    "no-beta": lambda: tk.delta_rule(Q, Q, Q, None),
    "integer-state": lambda: tk.chunk_simple_gla(Q, Q, Q, initial_state=torch.ones(1, 2, 16, 16, dtype=torch.int32)),
    "scale-nan": lambda: tk.chunk_simple_gla(Q, Q, Q, scale=float("nan")),
    "scale-text": lambda: tk.chunk_delta_rule(Q, Q, Q, ONES, scale="1"),
    "based-list": lambda: tk.fused_chunk_based([1.0], Q, Q),
    "mamba-list": lambda: tk.mamba_chunk_scan_combined([1.0], ONES, torch.ones(2), Q, Q, 64),
    "mamba-elsewhere": lambda: tk.mamba_chunk_scan_combined(Q, ONES, torch.ones(2).to("meta"), Q, Q, 64),
}  # fmt: skip


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_wrong_kinds_dtypes_and_devices(call):
    with pytest.raises(InvalidInputError):
        call()


def test_values_of_fake_tensors_are_not_read():
    with FakeTensorMode():
        q, y = torch.ones(1, 12, 2, 16), torch.zeros(12, dtype=torch.int64)
        assert tk.chunk_simple_gla(q, q, q, cu_seqlens=y[:3], backend="portable")[0].shape == q.shape
        assert tk.cross_entropy(q[0, :, 0], y, backend="portable").shape == ()
