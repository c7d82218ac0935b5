"""The thread that looks for waits in symmetric memory which do not end, on words that a stream would have written."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from gpu_accel.ring_attention import symmetric
from gpu_accel.ring_attention.faults import CommunicationError


class Lost(threading.Event):
    rank = None

    def __call__(self, rank: int) -> None:
        self.rank = rank
        self.set()


def test_a_wait_that_does_not_end_is_told_with_the_rank_it_is_for():
    words, lost = torch.zeros(5, dtype=torch.int32), Lost()
    watch = symmetric._Watch(2, words, 0.2, lost)
    for rank in (3, 5):
        number, begun, over = watch.issue(1, rank, 100 + rank)
        assert (begun, over) == (words.data_ptr() + 8, words.data_ptr() + 12)
        words[2] = number
        if rank == 3:
            words[3] = number
    assert watch.waiting() == [(1, 2)] and watch.waited_for() == [(5, 105)]
    assert lost.wait(5) and lost.rank == 5


def test_waits_that_end_and_waits_that_have_not_begun_are_left_alone():
    """However long the queue of a stream is, and however many waits follow one another."""
    words, lost = torch.zeros(5, dtype=torch.int32), Lost()
    watch = symmetric._Watch(2, words, 0.25, lost)
    for _ in range(12):
        number, _, _ = watch.issue(0, 1)
        words[0] = number
        time.sleep(0.05)
        words[1] = number
    watch.issue(1, 2)  # issued, but the stream has not come to it
    assert not lost.wait(0.4) and len(watch.ranks[0]) < 10


def test_waits_in_replays_of_a_graph_are_told_from_one_another_and_watched():
    """They come again with the same number; one that is seen in two replays does not last as long as both."""
    words, lost = torch.zeros(5, dtype=torch.int32), Lost()
    watch = symmetric._Watch(2, words, 0.25, lost)
    number, begun, over = watch.issue(1, 6, 106, in_graph=True)
    assert watch.turn == words.data_ptr() + 16 and (begun, over) == (words.data_ptr() + 8, words.data_ptr() + 12)
    for turn in range(12):
        words[3] = 0  # what a graph writes before it waits: the last wait may have been this one
        words[2] = number
        assert watch.waiting() == [(1, number)]
        time.sleep(0.05)
        words[4] = turn + 1
    assert not lost.is_set()
    words[3] = number
    assert watch.waiting() == []
    for _ in range(20):  # issued one by one between replays: forgotten when they are over, the graph's are not
        words[2] = words[3] = watch.issue(1, 2)[0]
    assert len(watch.ranks[1]) < 10
    words[3], words[2] = 0, number
    assert watch.waited_for() == [(6, 106)]
    assert lost.wait(5) and lost.rank == 6


def test_a_broken_transport_says_so_at_its_next_use():
    transport = object.__new__(symmetric.SymmetricTransport)
    transport._broken = "rank 1 did not answer within 600 s"
    uses = {
        "agree": lambda: transport.agree("anything"),
        "exchange": lambda: transport.exchange(torch.zeros(1), torch.zeros(1), to=0, source=0),
        "mail": lambda: transport.mail(),
    }
    for use in uses.values():
        with pytest.raises(CommunicationError, match="failed before .rank 1 did not answer.*start the ranks anew"):
            use()
