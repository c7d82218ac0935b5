"""The public names: the module and its gradients, the functions it is made of, and ring-flash-attention's names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import gpu_accel.ring_attention as ring
from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention.layouts import make_layout
from gpu_accel.ring_attention.simulate import simulate
from gpu_accel.testing import relative_error

sys.path.insert(0, str(Path(__file__).parent))
from test_schedules import make  # noqa: E402


def bhsd(seqlen: int = 23, dtype=torch.float64) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in make(seqlen, dtype=dtype)]


def expected(q, k, v, do, **options):
    q, k, v, do = (x.transpose(1, 2) for x in (q, k, v, do))
    found = (attention_truth(q, k, v, **options)[0], *attention_truth_backward(do, q, k, v, **options))
    return [x.transpose(1, 2) for x in found]


def test_the_module_simulates_ranks_and_is_differentiable():
    q, k, v, do = bhsd()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    module = ring.RingAttention(num_gpus=8, simulate=True)
    o = module(*leaves, causal=True, seq_len=23)
    for x, exact in zip((o, *torch.autograd.grad(o, leaves, do)), expected(q, k, v, do, causal=True), strict=True):
        assert x.shape == exact.shape and relative_error(x, exact) < 1e-13
    with pytest.raises(InvalidInputError, match="seq_len is 24, but simulated ranks take the whole 23 tokens"):
        module(q, k, v, seq_len=24)
    with pytest.raises(InvalidInputError, match="q has 23 tokens, k and v have 9: ranks hold the same tokens"):
        module(q, k[:, :, :9], v[:, :, :9])


def test_the_module_on_ranks_with_shards_and_padding():
    """What each process runs under torchrun, here with the transports of simulated ranks; 23 tokens on 4."""
    q, k, v, do = bhsd()
    layout = make_layout("striped", seqlen=23, ranks=4)

    def one_rank(transport):
        module = ring.RingAttention(num_gpus=4, layout="striped", schedule="ulysses", transport=transport)
        leaves = [layout.shard(x, transport.rank, dim=2).requires_grad_() for x in (q, k, v)]
        o = module(*leaves, causal=True, seq_len=23, window_size=(9, 0))
        return o, *torch.autograd.grad(o, leaves, layout.shard(do, transport.rank, dim=2))

    results = simulate(one_rank, 4)
    for i, exact in enumerate(expected(q, k, v, do, window_size=(9, 0))):
        assert relative_error(layout.unshard([r[i] for r in results], dim=2), exact) < 1e-13


def test_the_wrong_number_of_gpus_is_an_error():
    q, k, v, _ = bhsd()

    def one_rank(transport):
        ring.RingAttention(num_gpus=8, transport=transport)(q, k, v)

    with pytest.raises(HardwareError, match="num_gpus is 8, but there are 2 ranks"):
        simulate(one_rank, 2)
    with pytest.raises(HardwareError, match="torch.distributed is not initialised"):
        ring.RingAttention(num_gpus=8)(q, k, v, seq_len=1_000_000)
    with pytest.raises(InvalidInputError, match="simulate=True needs num_gpus"):
        ring.RingAttention(simulate=True)
    with pytest.raises(InvalidInputError, match="schedule must be one of"):
        ring.RingAttention(schedule="spiral")
    with pytest.raises(InvalidInputError, match="num_gpus must be a whole number"):
        ring.RingAttention(num_gpus=0)


def test_forward_and_backward_as_functions():
    q, k, v, do = bhsd()
    exact = expected(q, k, v, do, causal=True)
    o, lse = ring.ring_attention_forward(q, k, v, 3, causal=True)
    assert relative_error(o, exact[0]) < 1e-13 and lse.shape == (1, 4, 23)
    plain, _ = ring.ring_attention_forward(q, k, v, 3, overlap=False, causal=True)
    assert torch.equal(o, plain)
    for grad, truth in zip(ring.ring_attention_backward(do, q, k, v, 3, causal=True), exact[1:], strict=True):
        assert relative_error(grad, truth) < 1e-13
    with pytest.raises(InvalidInputError, match="leave them out"):
        ring.ring_attention_backward(do, q, k, v, 3, O=o)


def test_backward_on_ranks_with_and_without_the_results_of_the_forward():
    q, k, v, do = bhsd(24)
    layout = make_layout("zigzag", seqlen=24, ranks=2)

    def one_rank(transport):
        parts = [layout.shard(x, transport.rank, dim=2) for x in (q, k, v, do)]
        o, lse = ring.ring_attention_forward(*parts[:3], transport, causal=True)
        given = ring.ring_attention_backward(parts[3], *parts[:3], transport, O=o, lse=lse, causal=True)
        return given, ring.ring_attention_backward(parts[3], *parts[:3], transport, causal=True)

    results = simulate(one_rank, 2)
    for i, exact in enumerate(expected(q, k, v, do, causal=True)[1:]):
        for which in (0, 1):
            assert relative_error(layout.unshard([r[which][i] for r in results], dim=2), exact) < 1e-13


def test_shards_of_a_sequence():
    tokens = torch.arange(10)[None]
    assert [s.tolist() for s in ring.shard_sequence(tokens, 4)] == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]], [[9, 0, 0]]]
    assert [s.tolist() for s in ring.shard_sequence(tokens, 2, 8, padding=-1)][1] == [[8, 9, -1, -1, -1, -1, -1, -1]]
    assert ring.block_shard(tokens, 1, 2, layout="striped").tolist() == [[1, 3, 5, 7, 9]]
    with pytest.raises(InvalidInputError, match="block_size is 2, but 4 shards of 10 tokens have 3"):
        ring.shard_sequence(tokens, 4, 2)


def test_the_ring_taken_apart_is_the_ring():
    q, k, v, _ = bhsd(24)
    exact = attention_truth(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)[0].transpose(1, 2)
    layout = make_layout("zigzag", seqlen=24, ranks=3)
    blocks = [tuple(layout.shard(x, r, dim=2) for x in (k, v)) for r in range(3)]
    rows = [
        ring.distributed_attention_exact(layout.shard(q, r, dim=2), blocks, 3, rank=r, causal=True) for r in range(3)
    ]
    assert relative_error(layout.unshard(rows, dim=2), exact) < 1e-13

    def by_hand(transport):
        """Keys go round by ring_send_recv, hidden behind local_attention, and results are accumulated."""
        mine, r = layout.shard(q, transport.rank, dim=2).transpose(1, 2), transport.rank
        block, found = torch.cat(blocks[r], -1), []
        for step in range(3):
            kv = [x.transpose(1, 2) for x in block.split([8, 16], -1)]
            source = (r - step) % 3
            part, block = ring.overlap_comm_compute(
                lambda block=block: ring.ring_send_recv(block, transport=transport),
                lambda kv=kv, source=source: ring.local_attention(
                    mine, *kv, rank=r, source=source, layout=layout, causal=True
                ),
            )
            found.append(part)
        assert torch.equal(block, torch.cat(blocks[r], -1))  # once round
        return ring.accumulate_attention_outputs(found)[0].transpose(1, 2)

    assert relative_error(layout.unshard(simulate(by_hand, 3), dim=2), exact) < 1e-13


def test_results_of_ranks_accumulate_in_place_and_globally():
    q, k, v, _ = make(12)
    exact, exact_lse = attention_truth(q, k, v)
    halves = [attention_truth(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 5), (5, 12))]
    o, lse = torch.zeros_like(exact), torch.full_like(exact_lse, float("-inf"))
    found = ring.accumulate_attention_outputs(halves, (o, lse))
    assert found[0] is o and relative_error(o, exact) < 1e-14 and relative_error(lse, exact_lse) < 1e-14
    everywhere = simulate(lambda t: ring.global_accumulate(*halves[t.rank], transport=t), 2)
    assert all(torch.equal(x[0], everywhere[0][0]) and relative_error(x[0], exact) < 1e-14 for x in everywhere)
    with pytest.raises(InvalidInputError, match="nothing to accumulate"):
        ring.accumulate_attention_outputs([])


def test_a_block_goes_to_another_rank():
    def one_rank(transport):
        x = torch.full((2,), float(transport.rank))
        source, to = (transport.rank - 2) % 5, (transport.rank + 2) % 5
        return ring.ring_communicate_kv(x, source, to, transport=transport)[0].item()

    assert simulate(one_rank, 5) == [3.0, 4.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("function", "layout"),
    [("ring_flash_attn_func", "contiguous"), ("zigzag_ring_flash_attn_func", "zigzag"),
     ("stripe_flash_attn_func", "striped")],
)  # fmt: skip
def test_names_of_ring_flash_attention(function: str, layout: str):
    q, k, v, do = make(24)
    exact = (attention_truth(q, k, v, causal=True)[0], *attention_truth_backward(do, q, k, v, causal=True))
    cut = make_layout(layout, seqlen=24, ranks=3)

    def one_rank(transport):
        leaves = [cut.shard(x, transport.rank).requires_grad_() for x in (q, k, v)]
        o, lse, _ = getattr(ring, function)(*leaves, causal=True, return_attn_probs=True, group=transport)
        assert lse.shape == (1, 4, 8)
        return o, *torch.autograd.grad(o, leaves, cut.shard(do, transport.rank))

    results = simulate(one_rank, 3)
    for i, x in enumerate(exact):
        assert relative_error(cut.unshard([r[i] for r in results]), x) < 1e-13


@pytest.mark.parametrize(
    ("name", "layout"), [("ring", "contiguous"), ("zigzag_ring", "zigzag"), ("stripe", "striped")]
)
def test_packed_names_and_what_they_refuse(name: str, layout: str):
    q, k, v, _ = make(8, heads_kv=4)
    v = v[..., :8]
    exact = attention_truth(q, k, v, causal=True)[0]
    cut = make_layout(layout, seqlen=8, ranks=2)
    kv_packed, qkv_packed = (getattr(ring, f"{name}_flash_attn_{kind}packed_func") for kind in ("kv", "qkv"))

    def one_rank(transport):
        a, b, c = (cut.shard(x, transport.rank) for x in (q, k, v))
        one = kv_packed(a, torch.stack([b, c], 2), causal=True, group=transport)
        two = qkv_packed(torch.stack([a, b, c], 2), causal=True, group=transport)
        assert torch.equal(one, two)
        with pytest.raises(UnsupportedError, match="dropout_p is not supported"):
            ring.zigzag_ring_flash_attn_func(a, b, c, dropout_p=0.1, group=transport)
        with pytest.raises(InvalidInputError, match="an even number of rows, got 3"):
            ring.zigzag_ring_flash_attn_func(a[:, :3], b[:, :3], c[:, :3], group=transport)
        return one

    assert relative_error(cut.unshard(simulate(one_rank, 2)), exact) < 1e-13


def test_packed_documents_by_the_name_of_ring_flash_attention():
    """Report #46 there: short documents, and lse of two dimensions."""
    documents = (16, 4, 0, 8)
    q, k, v, do = make(28)
    cut = make_layout("documents", seqlen=28, ranks=2, documents=documents)

    def one_rank(transport):
        leaves = [cut.shard(x, transport.rank)[0].requires_grad_() for x in (q, k, v)]
        ends = torch.tensor([0, 8, 10, 10, 14], dtype=torch.int32)
        o, lse, _ = ring.zigzag_ring_flash_attn_varlen_func(
            *leaves, ends, 8, causal=True, return_attn_probs=True, group=transport
        )
        assert lse.shape == (4, 14)
        wrongs = ([0, 7, 14], [0, 8], [0, 16, 14], [2, 14], [14], None, ["a", "b"], [0, 4.9, 14.2], [0.0, 14.0], "048",
                  {0: 1, 14: 2}, [False, False], [0, float("inf")], [[0, 14]], torch.tensor([0.0, 14.0]),
                  torch.tensor([[0, 14]]), torch.tensor(14), torch.tensor([False, True]),
                  ends.to("meta"), ends.to_sparse())  # fmt: skip
        for wrong in wrongs:
            with pytest.raises(InvalidInputError, match="cu_seqlens must"):
                ring.zigzag_ring_flash_attn_varlen_func(*leaves, wrong, group=transport)
        plain = ring.zigzag_ring_flash_attn_varlen_func(*leaves, ends.tolist(), causal=True, group=transport)
        assert torch.equal(o, plain)
        narrow = [x[..., :8] for x in leaves]
        packed = ring.zigzag_ring_flash_attn_varlen_kvpacked_func(
            narrow[0], torch.stack(narrow[1:], 1), ends, 8, causal=True, group=transport
        )
        assert torch.equal(
            packed, ring.zigzag_ring_flash_attn_varlen_func(*narrow, ends, causal=True, group=transport)
        )
        three = torch.stack([narrow[0][:, :2], *narrow[1:]], 1)  # as many heads of all three
        packed = ring.zigzag_ring_flash_attn_varlen_qkvpacked_func(
            three, ends, 8, 0.0, None, True, (-1, -1), None, False, False, transport
        )
        one = ring.zigzag_ring_flash_attn_varlen_func(*three.unbind(1), ends, causal=True, group=transport)
        assert torch.equal(one, packed)
        for name, x in (("kvpacked", (leaves[0], three)), ("qkvpacked", (three[None],))):
            with pytest.raises(InvalidInputError, match="tensor .local_length, [23], heads"):
                getattr(ring, f"zigzag_ring_flash_attn_varlen_{name}_func")(*x, ends, group=transport)
        for wrong in (None, torch.zeros(2), -0.1, False, "0"):
            with pytest.raises(InvalidInputError, match="dropout_p must be"):
                ring.zigzag_ring_flash_attn_varlen_func(*leaves, ends, dropout_p=wrong, group=transport)
        with pytest.raises(UnsupportedError, match="alibi_slopes is not supported"):
            ring.zigzag_ring_flash_attn_varlen_func(*leaves, ends, alibi_slopes=torch.ones(4), group=transport)
        with pytest.raises(InvalidInputError, match="q must be a tensor .local_length, heads, head_dim."):
            ring.zigzag_ring_flash_attn_varlen_func(leaves[0][None], *leaves[1:], ends, group=transport)
        return o[None], *(x[None] for x in torch.autograd.grad(o, leaves, cut.shard(do, transport.rank)[0]))

    found, start = simulate(one_rank, 2), 0
    whole = [cut.unshard([r[i] for r in found]) for i in range(4)]
    for length in documents:
        part = slice(start, start + length)
        qkv, start = [x[:, part] for x in (q, k, v)], start + length
        exact = (attention_truth(*qkv, causal=True)[0], *attention_truth_backward(do[:, part], *qkv, causal=True))
        assert all(relative_error(x[:, part], e) < 1e-13 for x, e in zip(whole, exact, strict=True) if length)


def test_symmetric_memory_needs_gpus():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here; tests/gpu has its tests")
    with pytest.raises(HardwareError, match="symmetric memory needs CUDA GPUs"):
        ring.SymmetricTransport()


def test_the_transport_of_simulated_ranks_finds_mistakes():
    def deadlock(transport):
        out = torch.empty(1)
        transport.transfer([], [(out, 1 - transport.rank)]).wait()

    with pytest.raises(ring.CommunicationError, match="all ranks wait"):
        simulate(deadlock, 2)

    def overwrite(transport):
        a, b = transport.buffers(2, (4,), torch.ones(1))
        a.fill_(1)
        pending = transport.exchange(a, b, to=1 - transport.rank, source=1 - transport.rank)
        a.fill_(2)
        pending.wait()

    with pytest.raises(AssertionError, match="changed a message while it was on its way"):
        simulate(overwrite, 2)

    def leave(transport):
        if transport.rank == 0:
            transport.transfer([], [(torch.empty(1), 1)]).wait()

    with pytest.raises(ring.CommunicationError, match="waits for rank 1, which has ended"):
        simulate(leave, 2)


def test_nan_of_one_rank_is_an_error_where_asked_for():
    q, k, v, _ = bhsd(24)
    k[0, 1, 20, 3] = float("nan")
    assert ring.RingAttention(num_gpus=3, simulate=True)(q, k, v, causal=True)[:, :, :20].isfinite().all()
    with pytest.raises(InvalidInputError, match="k holds NaN or Inf in tokens 20 to 23"):
        ring.RingAttention(num_gpus=3, simulate=True, check_finite=True)(q, k, v, causal=True)
