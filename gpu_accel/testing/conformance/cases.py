"""The cases: what went wrong somewhere, the smallest input that shows it, and what is right.

On a CPU lengths are divided, since our kernels run in Triton's interpreter there; what makes a case hard stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.testing.conformance.judge import Attend, check, expect
from gpu_accel.testing.inputs import generator

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ConformanceCase:
    """`report` is where it was seen (empty: nowhere public), `right` what has to come out.

    `run` raises IncorrectResultError when it does not.
    """

    name: str
    report: str
    right: str
    run: Callable[[Attend, torch.device], None]
    gpu_only: str = ""


CASES: dict[str, ConformanceCase] = {}


def case(report: str, right: str, *, gpu_only: str = "") -> Callable[[Callable[[Attend, torch.device], None]], None]:
    def add(run: Callable[[Attend, torch.device], None]) -> None:
        name = run.__name__.strip("_").replace("_", "-")
        CASES[name] = ConformanceCase(name, report, right, run, gpu_only)

    return add


def normal(device: torch.device, *shapes: Shape, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    source = generator(seed, device)
    return [torch.randn(shape, generator=source, device=device).to(dtype) for shape in shapes]


def offsets(device: torch.device, *lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def small(device: torch.device, on_gpu: int, on_cpu: int) -> int:
    return on_gpu if device.type == "cuda" else on_cpu


@case("Dao-AILab/flash-attention#1214", "every element of o is written")
def packed_head_dim_192(attend: Attend, device: torch.device) -> None:
    q, k, v = normal(device, (3, 16, 192), (7, 16, 192), (7, 16, 192), dtype=torch.float16)
    cu: dict[str, Any] = {"cu_seqlens_q": offsets(device, 3), "cu_seqlens_k": offsets(device, 7)}
    check(attend, q, k, v, causal=True, gradients=False, **cu)


@case("Dao-AILab/flash-attention#1254", "the backward pass ends; gradients of an empty sequence are 0")
def packed_empty_sequences(attend: Attend, device: torch.device) -> None:
    heads, rows, keys = small(device, 32, 2), small(device, 1023, 65), small(device, 2045, 130)
    q, k, v = normal(device, (rows, heads, 128), (1 + keys, heads, 128), (1 + keys, heads, 128))
    cu: dict[str, Any] = {"cu_seqlens_q": offsets(device, 0, 0, rows), "cu_seqlens_k": offsets(device, 0, 1, keys)}
    check(attend, q, k, v, causal=True, **cu)


@case("Dao-AILab/flash-attention#1052", "finite gradients")
def large_scores(attend: Attend, device: torch.device) -> None:
    shape = (1, small(device, 1024, 128), 1, 128)
    q, k, v = (3 * x for x in normal(device, shape, shape, shape, dtype=torch.float16))
    check(attend, q, k, v, causal=True)


@case("Dao-AILab/flash-attention#443", "rows that see no key: o 0, gradients 0")
def packed_rows_without_keys(attend: Attend, device: torch.device) -> None:
    q, k, v = (3 * x for x in normal(device, (256, 2, 32), (3, 2, 32), (3, 2, 32), dtype=torch.float16))
    cu: dict[str, Any] = {"cu_seqlens_q": offsets(device, 76, 34, 146), "cu_seqlens_k": offsets(device, 1, 1, 1)}
    check(attend, q, k, v, causal=True, **cu)


@case("Dao-AILab/flash-attention#1778", "with bottom-right alignment the first rows see nothing: o 0, lse -inf")
def more_queries_than_keys(attend: Attend, device: torch.device) -> None:
    rows, keys = small(device, 2048, 96), small(device, 1024, 40)
    q, k, v = normal(device, (1, rows, 2, 64), (1, keys, 2, 64), (1, keys, 2, 64))
    check(attend, q, k, v, causal=True)


@case("Dao-AILab/flash-attention#1537", "single queries next to empty sequences")
def packed_single_queries(attend: Attend, device: torch.device) -> None:
    q, k, v = normal(device, (2, 9, 64), (8, 3, 64), (8, 3, 64))
    cu: dict[str, Any] = {"cu_seqlens_q": offsets(device, 0, 1, 0, 1), "cu_seqlens_k": offsets(device, 0, 3, 0, 5)}
    check(attend, q, k, v, causal=True, gradients=False, **cu)


@case("Dao-AILab/flash-attention#1619", "fewer queries than sequences, grouped heads")
def packed_fewer_queries_than_sequences(attend: Attend, device: torch.device) -> None:
    q, k, v = normal(device, (1, 21, 120), (1, 7, 120), (1, 7, 120))
    cu: dict[str, Any] = {"cu_seqlens_q": offsets(device, 0, 0, 0, 1), "cu_seqlens_k": offsets(device, 0, 0, 0, 1)}
    check(attend, q, k, v, causal=True, gradients=False, **cu)


@case("flashinfer-ai/flashinfer#941", "NaN behind the last sequence does not reach the rows of a sequence")
def packed_nan_in_padding(attend: Attend, device: torch.device) -> None:
    keys = small(device, 333, 43)
    q, k, v = normal(device, (keys, 4, 64), (keys + 19, 2, 64), (keys + 19, 2, 64))
    k[keys:], v[keys:] = float("nan"), float("nan")
    cu: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), offsets(device, 13, keys - 13))
    check(attend, q, k, v, causal=True, gradients=False, rows=slice(0, keys), **cu)


@case("Dao-AILab/flash-attention#1661", "rows behind the last sequence have no gradient, and change no other row")
def packed_rows_behind_the_last_sequence(attend: Attend, device: torch.device) -> None:
    rows = small(device, 300, 41)
    tensors = normal(device, (rows + 30, 4, 64), (rows + 30, 2, 64), (rows + 30, 2, 64))
    cu: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), offsets(device, 17, rows - 17))
    check(attend, *tensors, causal=True, gradients=False, rows=slice(0, rows), **cu)
    leaves = [x.detach().requires_grad_() for x in tensors]
    o, _ = attend(*leaves, causal=True, **cu)
    for name, x in zip("qkv", torch.autograd.grad(o[:rows].float().square().sum(), leaves), strict=True):
        expect(f"the gradient of {name} is not 0 behind the last sequence", not x[rows:].any())


@case("Dao-AILab/flash-attention#2541", "views of a fused projection give what contiguous tensors give")
def fused_projection(attend: Attend, device: torch.device) -> None:
    rows = small(device, 257, 33)
    (fused,) = normal(device, (2, rows, 3, 2, 256))
    check(attend, *fused.unbind(2), causal=True)


@case("flagos-ai/FlagAttention#45", "k and v have strides of their own")
def strides_of_their_own(attend: Attend, device: torch.device) -> None:
    rows = small(device, 200, 40)
    q, k, v = normal(device, (1, rows, 2, 64), (1, 2 * rows, 2, 64), (1, rows, 2, 64))
    check(attend, q, k[:, ::2], v, causal=True)


@case("Dao-AILab/flash-attention#355", "the gradient of a sum, whose strides are all 0")
def broadcast_output_gradient(attend: Attend, device: torch.device) -> None:
    q, k, v = normal(device, (2, 32, 4, 128), (2, 32, 1, 128), (2, 32, 1, 128))
    one = torch.ones((), dtype=q.dtype, device=device)
    check(attend, q, k, v, do=one.expand(2, 32, 4, 128))


@case("pytorch/pytorch#196678", "finite gradients where every score is far below 0")
def very_negative_scores(attend: Attend, device: torch.device) -> None:
    shape = (1, small(device, 704, 72), 1, 64)
    q, k, v = normal(device, shape, shape, shape)
    q, k = (0.1 * q + 4.0).to(q.dtype), (0.1 * k - 4.0).to(k.dtype)  # scores of about -128
    check(attend, q, k, v)


@case("thu-ml/SageAttention#388", "170 thousand keys are no noise")
def very_many_keys(attend: Attend, device: torch.device) -> None:
    keys = small(device, 170_000, 600)
    q, k, v = normal(device, (1, 5, 2, 64), (1, keys, 1, 64), (1, keys, 1, 64))
    check(attend, q, k, v, gradients=False)


@case("NVIDIA/cudnn-frontend#1072", "one query and very negative scores: finite gradients of k and v")
def one_query_very_negative_scores(attend: Attend, device: torch.device) -> None:
    q, k, v = normal(device, (1, 1, 2, 64), (1, 128, 2, 64), (1, 128, 2, 64))
    q, k = (0.1 * q + 8.0).to(q.dtype), (0.1 * k - 8.0).to(k.dtype)
    check(attend, q, k, v)


@case("huggingface/transformers#39408", "a window of (w - 1, 0) lets a query see w keys, itself among them")
def window_counts_the_query(attend: Attend, device: torch.device) -> None:
    rows, window = small(device, 300, 37), 5
    q, k, _ = normal(device, (1, rows, 1, 64), (1, rows, 1, 64), (1, 1, 1, 64))
    v = torch.ones(1, rows, 1, 64, dtype=q.dtype, device=device)
    v[:, : rows - window] = 0.0  # the last query sees ones alone, the one before it one zero
    o, _ = attend(torch.zeros_like(q), k, v, causal=True, window_size=(window - 1, 0))
    last = o[0, -2:, 0, 0].float().tolist()
    expect(f"the last two rows are {last}, not [0.8, 1.0]", abs(last[0] - 0.8) < 0.01 and last[1] == 1.0)
    check(attend, q, k, q, causal=True, window_size=(window - 1, 0))


@case("pytorch/pytorch#108108", "causal is aligned to the bottom right when lengths differ")
def causal_alignment(attend: Attend, device: torch.device) -> None:
    q, k, v = normal(device, (1, 2, 1, 64), (1, 5, 1, 64), (1, 5, 1, 64))
    check(attend, q, k, v, causal=True)


@case("Dao-AILab/flash-attention#1347", "a head_dim that is no multiple of 16 or 32, with gradients")
def head_dim_104(attend: Attend, device: torch.device) -> None:
    rows = small(device, 720, 50)
    q, k, v = normal(device, (1, rows, 2, 104), (1, rows, 2, 104), (1, rows, 2, 104))
    check(attend, q, k, v)


@case("turboderp-org/exllamav3#316", "the same bits in every run, whatever was in memory")
def head_dim_72_repeats(attend: Attend, device: torch.device) -> None:
    shape = (1, small(device, 512, 70), 2, 72)
    q, k, v = normal(device, shape, shape, shape, dtype=torch.float16)
    first, _ = attend(q, k, v)
    for seed in range(3):
        torch.full((1 << 20,), float("nan") if seed else 1e4, device=device)  # left in free memory
        again, _ = attend(q, k, v)
        expect(f"run {seed + 2} differs from the first by {(again - first).abs().max():.3g}", torch.equal(again, first))
    check(attend, q, k, v, gradients=False)


@case("vllm-project/vllm#51902", "a row has the same bits whoever its neighbours in the batch are")
def neighbours_do_not_matter(attend: Attend, device: torch.device) -> None:
    keys = small(device, 1980, 130)
    q, k, v = normal(device, (4, 1, 14, 64), (4, keys, 2, 64), (4, keys, 2, 64))
    together, _ = attend(q, k, v, causal=True)
    alone, _ = attend(q[1:2], k[1:2], v[1:2], causal=True)
    expect(f"differs by {(together[1:2] - alone).abs().max():.3g}", torch.equal(together[1:2], alone))


@case("Dao-AILab/flash-attention#2611", "row offsets beyond 2^31 elements", gpu_only="8 GB of GPU memory")
def offsets_beyond_int32(attend: Attend, device: torch.device) -> None:
    if torch.cuda.mem_get_info(device)[0] < 8e9:
        raise UnsupportedError("needs 8 GB of free GPU memory")
    batch, rows, heads, dim = 4, 96, 2, 64
    stride = 6_000_000  # elements between rows; those of the last sequence lie beyond 2^31
    memory = torch.empty(batch * rows * stride, dtype=torch.bfloat16, device=device)
    fused = memory.as_strided((batch, rows, 3, heads, dim), (rows * stride, stride, heads * dim, dim, 1))
    fused.normal_(generator=generator(0, device))
    check(attend, *fused.unbind(2), causal=True)


@case("flashinfer-ai/flashinfer#2733", "torch.compile(fullgraph=True) gives what eager execution gives")
def compiles_as_one_graph(attend: Attend, device: torch.device) -> None:
    shape = (1, small(device, 256, 32), 2, 64)
    q, k, v = normal(device, shape, shape, shape)
    torch.compiler.reset()
    # On a CPU nothing is gained by generating code, and Triton's interpreter cannot be traced into it.
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(lambda *x, **o: attend(*x, **o), fullgraph=True, backend=backend)
    check(compiled, q, k, v, causal=True)


@case("flashinfer-ai/flashinfer#4609", "a CUDA graph replays with other values", gpu_only="CUDA graphs")
def replays_in_a_graph(attend: Attend, device: torch.device) -> None:
    shape = (2, 320, 4, 64)
    q, k, v = normal(device, shape, shape, shape)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        attend(q, k, v, causal=True)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        o, lse = attend(q, k, v, causal=True)
    for old, new in zip((q, k, v), normal(device, shape, shape, shape, seed=7), strict=True):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    check(lambda *_, **__: (o, lse), q, k, v, causal=True, gradients=False)


@case("", "no keys at all: o 0, lse -inf")
def no_keys(attend: Attend, device: torch.device) -> None:
    q, k, v = normal(device, (1, 3, 2, 64), (1, 0, 2, 64), (1, 0, 2, 64))
    o, lse = attend(q, k, v)
    expect("o is not 0", o.shape == q.shape and not o.any())
    expect("lse is not -inf", lse is None or bool((lse == float("-inf")).all()))


@case("", "soft caps with scores far beyond the cap")
def softcap_of_large_scores(attend: Attend, device: torch.device) -> None:
    shape = (1, small(device, 320, 64), 2, 64)
    q, k, v = normal(device, shape, shape, shape)
    check(attend, 5 * q, 5 * k, v, causal=True, softcap=10.0)
