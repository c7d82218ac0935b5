"""The `decode` experiment: its grid, a judge that can fail, bytes, and a whole run on a CPU."""

from __future__ import annotations

import importlib

import pytest
import torch

from gpu_accel.errors import IncorrectResultError, UnsupportedError
from gpu_accel.flash_attention3 import flash_attn_with_kvcache
from gpu_accel.workbench import runner
from gpu_accel.workbench.experiment import Settings
from gpu_accel.workbench.registry import paper

FA3 = paper("fa3")
GPU, CPU = Settings(device="cuda"), Settings(device="cpu")
FA3.experiment("decode")  # imports the folder as a package
decode = importlib.import_module(f"{FA3._package()}.decode")
reading = importlib.import_module(f"{FA3._package()}.reading")


def test_the_grid_has_every_size_contiguous_and_paged():
    found = decode.list_cases(GPU)
    assert {(c["batch"], c["seqlen_k"]) for c in found} == set(decode.SIZES)
    assert {c["page"] for c in found} == {0, 1, 16, 64, 256} and {c["seqlen_q"] for c in found} == {1}
    assert {c["dtype"] for c in decode.list_cases(Settings(device="cuda", precision="fp8"))} == {"e4m3"}
    (case, paged) = decode.list_cases(Settings(device="cuda", shapes=({"batch": 3, "seqlen": 999},)))
    assert (case["batch"], case["seqlen_q"], case["seqlen_k"], case["heads"], case["heads_kv"]) == (3, 1, 999, 32, 8)
    assert (case["page"], paged["page"]) == (0, 16)


def test_bytes_are_those_of_the_cache():
    case = decode.list_cases(GPU)[0]  # one sequence, 4096 keys, 8 heads of 128, 16 bits
    cache = 2 * 4096 * 8 * 128 * 2
    assert cache < decode.bytes_moved(case) < 1.002 * cache
    eight = decode.bytes_moved({**case, "dtype": "e4m3"})
    assert 0.5 * cache < eight < 0.502 * cache


def test_who_cannot_do_the_same_says_so():
    for changes in ({"page": 16}, {"dtype": "e4m3"}):
        case = decode.list_cases(CPU)[0] | changes
        why = {one.name: one.unavailable for one in decode.build(case, CPU).implementations}
        ours = {"hopper", "portable", "portable-invariant"}
        ours |= {"hopper-bf16", "portable-bf16"} if "dtype" in changes else set()
        assert set(why) == {*ours, *decode.PEERS, "read", "copy"}
        assert all(why[name] for name in decode.PEERS) and not why["portable"] and not why["copy"]
        assert "compute capability 9.0" in why["hopper"]
    with pytest.raises(UnsupportedError, match="draws its caches"):
        decode.build(
            decode.list_cases(Settings(device="cpu", input="smollm2"))[0], Settings(device="cpu", input="smollm2")
        )


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_a_wrong_result_fails(dtype):
    decoding = decode.Decoding(decode.list_cases(CPU)[1] | {"dtype": dtype}, "cpu")
    made = decoding.arguments(3)
    right = flash_attn_with_kvcache(**made, backend="reference")
    assert decoding.judge(3, made, lambda: right).ok
    for wrong in (right * 1.05, right.roll(1, 2), right.index_fill(1, torch.tensor(0), float("nan"))):
        assert not decoding.judge(3, made, lambda wrong=wrong: wrong).ok
    short = made | {"cache_seqlens": made["cache_seqlens"] - 16}
    assert not decoding.judge(3, made, lambda: flash_attn_with_kvcache(**short, backend="reference")).ok


def test_a_cache_in_parts_is_quantised_as_a_whole():
    from gpu_accel.flash_attention3.reference_kvcache import quantize_cache

    x = torch.randn(3, 5, 2, 16, dtype=torch.bfloat16)
    for one, other in zip(decode._quantize(x), quantize_cache(x, "e4m3"), strict=True):
        assert torch.equal(one.float(), other.float())


def test_what_is_timed_is_verified_and_changed_inputs_are_found(monkeypatch):
    found = {one.name: one for one in decode.build(decode.list_cases(CPU)[1], CPU).implementations}
    timed = found["portable"].make(0)
    timed()
    assert timed.verify().ok and timed.verify().ok  # v, negated meanwhile, is as it was

    def careless(q, k_cache, v_cache, **options):
        v_cache[0, 0, 0, 0] += 1
        return flash_attn_with_kvcache(q, k_cache, v_cache, **options)

    monkeypatch.setattr(decode, "flash_attn_with_kvcache", careless)
    timed()
    with pytest.raises(IncorrectResultError, match="changed its input"):
        timed.verify()
    timed = found["read"].make(0)
    timed()
    assert timed.verify().ok
    monkeypatch.setattr(decode, "read_both", lambda k, v, out: reading.read_both(k[:-1], v[:-1], out))
    with pytest.raises(IncorrectResultError, match="not every word"):
        timed.verify()
    timed = found["copy"].make(0)
    with pytest.raises(IncorrectResultError, match="differs"):
        timed.verify()  # nothing has been copied yet
    timed()
    assert timed.verify().ok


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_run_on_a_cpu_checks_and_times_nothing(precision):
    result = runner.run("fa3", ["decode"], Settings(device="cpu", precision=precision, quick=True))
    assert result.status == "ok" and not result.incorrect
    assert {r.metric for r in result.records} == {"correct"} and {r.kind for r in result.records} == {"checked"}
    found = {r.impl for r in result.records}
    assert found >= {"portable", "portable-invariant", "read", "copy"}
    assert ("portable-bf16" in found) == (precision == "fp8")
    assert ("sdpa-flash" in found) == (precision == "bf16")
    assert all(outcome.why for outcome in result.skipped)
