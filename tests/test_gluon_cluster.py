"""PTX for single programs made PTX for pairs: what is changed, and what is not understood."""

from __future__ import annotations

import pytest

from gpu_accel.gluon_cluster import NotUnderstood, paired

OP = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
LOAD = OP + " [{to}], [{map}, {{%r1, %r2}}], [%r3];"
ARRIVE = "@%p2 mbarrier.arrive.shared::cta.b64 _, [%r9]{count};"
A, B, SCALES = (LOAD.format(to=to, map=of) for to, of in (("%r5", "%rd1"), ("%r6", "%rd2"), ("%r7", "%rd3")))


def test_the_second_map_and_counts_of_two():
    once, twice = ARRIVE.format(count=""), ARRIVE.format(count=", 2")
    kept = ["bar.sync 0, 128;", f"@%p1 {A}", SCALES, once]
    newer = B.replace("shared::cluster", "shared::cta")  # since Triton 3.7
    lines = paired("\n".join([kept[0], kept[1], f"@%p1 {B}", newer, SCALES, once, twice])).split("\n")
    assert [lines[0], lines[1], lines[4], lines[5]] == kept
    for line, guard in ((lines[2], "@%p1 "), (lines[3], "")):
        assert f"mov.b16 both, 3; {guard}cp.async" in line
        assert "complete_tx::bytes.multicast::cluster [%r6], [%rd2, {%r1, %r2}], [%r3], both; }" in line
    for rank in (0, 1):
        assert f"mapa.shared::cluster.u32 there, %r9, {rank}; @%p2 mbarrier.arrive.release.cluster" in lines[6]


@pytest.mark.parametrize(
    "text",
    [
        A + B + ARRIVE.format(count=""),
        A + A + ARRIVE.format(count=", 2"),
        A + B + B.replace("[%rd2, ", "[%rd2 + 64, ") + ARRIVE.format(count=", 2"),
    ],
    ids=["no arrivals", "one map", "a load of another form"],
)
def test_not_understood(text):
    with pytest.raises(NotUnderstood):
        paired(text)
