"""The table of the packed Hopper backward, in plain Triton: for every key the interval of queries that see it."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.flash_attention3 import hopper_backward
from gpu_accel.flash_attention3.hopper_backward_packed import HEAD, LINE, NEVER

LENGTHS = {
    "one": ([5], [7]),
    "empty-ones": ([3, 0, 10, 4, 0], [0, 6, 10, 150, 0]),
    "many": (list(range(17)), list(range(17, 0, -1))),
}


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 2), (0, -1)], ids=str)
@pytest.mark.parametrize("used", [False, True], ids=["whole", "seqused"])
@pytest.mark.parametrize("name", LENGTHS)
def test_intervals(name, used, window, device):
    lengths_q, lengths_k = LENGTHS[name]
    cu_q, cu_k = (offsets(x).to(device) for x in (lengths_q, lengths_k))
    counts = [[n * 2 // 3 for n in x] for x in (lengths_q, lengths_k)] if used else [lengths_q, lengths_k]
    seqused = [torch.tensor(x, dtype=torch.int32, device=device) if used else None for x in counts]
    total = int(cu_k[-1]) + 3  # rows behind the last sequence
    k = torch.empty(1, total, 1, 8, device=device)
    table = hopper_backward._intervals(k, cu_q, cu_k, *seqused, *window)
    tiles = -(-total // 128)
    assert table[:2].tolist() == [int(cu_q[-1]), int(cu_k[-1])]
    lines = table[HEAD.value :][: 2 * tiles * LINE.value].view(-1, LINE.value).tolist()
    first, last = table[HEAD.value + 2 * tiles * LINE.value :].view(2, -1)

    expected = torch.zeros(128 * tiles, max(1, int(cu_q[-1])), dtype=torch.bool)
    for b, (n, m) in enumerate(zip(*counts, strict=True)):
        if n and m:
            rows, keys = torch.arange(n)[:, None], torch.arange(m)[None, :]
            seen = torch.ones(n, m, dtype=torch.bool)
            if window[0] >= 0:
                seen &= keys >= rows + m - n - window[0]
            if window[1] >= 0:
                seen &= keys <= rows + m - n + window[1]
            expected[cu_k[b] : cu_k[b] + m, cu_q[b] : cu_q[b] + n] = seen.T
    row = torch.arange(expected.shape[1])
    found = (row >= first.cpu()[:, None]) & (row <= last.cpu()[:, None])
    assert torch.equal(found, expected)
    assert ((first == NEVER.value) == ~expected.any(1).to(device)).all()
    for i, line in enumerate(lines):
        of = slice(64 * i, 64 * i + 64)
        assert line == [int(first[of].min()), int(last[of].max()), int(first[of].max()), int(last[of].min())]


@pytest.mark.parametrize("window", [(-1, 0), (4, 2)], ids=str)
def test_intervals_of_keys_seen_by_queries(window, device):
    # the same table with queries and keys exchanged, for dQ above head_dim 128
    lengths_q, lengths_k = [70, 0, 9, 1], [50, 3, 9, 130]
    cu_q, cu_k = (offsets(x).to(device) for x in (lengths_q, lengths_k))
    q, k = (torch.empty(1, int(cu[-1]), 1, 256, device=device) for cu in (cu_q, cu_k))
    by_key, by_query = hopper_backward._packed_tables(q, k, cu_q, cu_k, None, None, *window)
    assert by_query is not None

    def seen(table, rows, columns):
        tiles = -(-rows // 128)
        first, last = table[HEAD.value + 2 * tiles * LINE.value :].view(2, -1).cpu()
        column = torch.arange(columns)
        return ((column >= first[:, None]) & (column <= last[:, None]))[:rows]

    assert torch.equal(seen(by_query, q.shape[1], k.shape[1]), seen(by_key, k.shape[1], q.shape[1]).T)
    assert by_query[:2].tolist() == by_key[:2].tolist()[::-1]


def test_rows_that_do_not_count_are_zeroed():
    x = torch.full((9, 1, 2), float("nan"))
    x[:2] = 1.0
    x[4] = 2.0
    got = hopper_backward._zeroed(x, torch.tensor([0, 4, 4, 8], dtype=torch.int32), torch.tensor([2, 0, 1]))
    assert got[:, 0, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]
