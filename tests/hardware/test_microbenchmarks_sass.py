"""Reading machine code: the disassembly, the control word of an instruction, loops, and patches of a cubin."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_accel.errors import IncorrectResultError, InvalidInputError
from gpu_accel.hardware.microbenchmarks.sass import Control, loop_holds, parse

LISTING = """
.text.k:
        /*0000*/                   LDG.E R11, desc[UR4][R2.64] ;               /* 0x00000004020b7981 */
                                                                               /* 0x000162000c1e1900 */
.L_x_2:
        /*0010*/                   VIADDMNMX R11, R11, R8, R9, !PT ;           /* 0x000000080b0b7246 */
                                                                               /* 0x021fe20007800109 */
        /*0020*/                   VIADD R0, R13.reuse, 0xffffffff ;           /* 0xffffffff0d007836 */
                                                                               /* 0x040fe20000000000 */
        /*0030*/                   FADD R3, R3, R4 ;                           /* 0x0000000403037221 */
                                                                               /* 0x000fc80000000000 */
        /*0040*/               @P1 BRA `(.L_x_2) ;                             /* 0xfffffff400f41947 */
                                                                               /* 0x000fea000383ffff */
.L_x_3:
        /*0050*/                   BRA `(.L_x_3) ;                             /* 0xfffffffc00fc7947 */
                                                                               /* 0x000fc0000383ffff */
"""


def test_a_listing_becomes_instructions_with_labels_and_encodings():
    function = parse(LISTING)["k"]
    assert [one.name for one in function.instructions] == ["LDG", "VIADDMNMX", "VIADD", "FADD", "BRA", "BRA"]
    assert function.labels == {".L_x_2": 0x10, ".L_x_3": 0x50}
    assert function.instructions[4].guard == "P1"
    assert function.instructions[0].encoding == 0x000162000C1E1900_00000004020B7981
    assert function.count("LDG.E") == function.count("LDG") == 1 and function.count("LD") == 0


def test_control_words_are_those_of_the_instructions():
    load, first, second, *_ = parse(LISTING)["k"].instructions
    assert load.control.write_barrier == 5 and load.control.read_barrier == 0
    assert load.control.stall == 1 and not load.control.wait
    assert first.control.wait == {0, 5}, "waits for the load: its result, and another counter"
    assert second.control.reuse == {0}, "as the listing says: R13.reuse is the first operand"


@given(
    stall=st.integers(0, 15), yields=st.booleans(),
    write=st.none() | st.integers(0, 5), read=st.none() | st.integers(0, 5),
    wait=st.frozensets(st.integers(0, 5)), reuse=st.frozensets(st.integers(0, 3)), rest=st.integers(0, 2**128 - 1),
)  # fmt: skip
def test_a_control_word_survives_its_encoding_and_leaves_the_rest_alone(stall, yields, write, read, wait, reuse, rest):
    control = Control(stall=stall, yields=yields, write_barrier=write, read_barrier=read, wait=wait, reuse=reuse)
    rest &= ~(0b11 << 126)  # the two bits above belong to no field
    encoded = control.encode(rest)
    assert Control.decode(encoded) == control
    assert encoded & ((1 << 105) - 1) == rest & ((1 << 105) - 1)


def test_the_loop_is_found_and_padding_is_none():
    function = parse(LISTING)["k"]
    (loop,) = function.loops()
    assert loop.opcodes == {"VIADDMNMX": 1, "VIADD": 1, "FADD": 1, "BRA": 1}
    assert loop_holds(function, "VIADDMNMX", 1, also=["FADD"], purity=1.0) == loop


@pytest.mark.parametrize(
    ("opcode", "at_least", "purity", "words"),
    [
        ("FFMA", 1, 0.0, "no loop holds 1 FFMA, but 1 VIADDMNMX"),
        ("VIADDMNMX", 2, 0.0, "no loop holds 2 VIADDMNMX"),
        ("VIADDMNMX", 1, 0.9, "only 50% of the timed loop is VIADDMNMX"),
    ],
    ids=["another", "too few", "not alone"],
)
def test_a_loop_that_holds_something_else_is_refused(opcode, at_least, purity, words):
    with pytest.raises(IncorrectResultError, match=words):
        loop_holds(parse(LISTING)["k"], opcode, at_least, purity=purity)


@pytest.mark.parametrize(
    "text", ["", "no code here", LISTING.replace(".text.k:", "")], ids=["empty", "text", "no function"]
)
def test_what_is_no_disassembly_is_refused(text):
    with pytest.raises(InvalidInputError, match="no function"):
        parse(text)


def test_a_listing_without_encodings_is_refused():
    bare = "\n".join(line for line in LISTING.splitlines() if not line.startswith("   " * 20))
    with pytest.raises(InvalidInputError, match="second half"):
        parse(bare)


# -- patches, which need the compiler

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install 'gpu-accel[microbenchmarks]'")


def disassembled(cubin: bytes, folder) -> dict:
    from gpu_accel.hardware.microbenchmarks.compile import nvdisasm

    file = folder / "patched.cubin"
    file.write_bytes(cubin)
    done = subprocess.run([nvdisasm(), "-c", "-hex", "-ndf", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


@pytest.mark.parametrize(("variant", "banks"), [("same-bank", 1), ("no-conflict", 2)])
def test_patched_registers_lie_in_the_banks_asked_for(variant, banks, tmp_path):
    from gpu_accel.hardware.microbenchmarks import cores

    cubin, count = cores.patched(cores.BANKS, variant)
    patched = [one for one in disassembled(cubin, tmp_path)["banks"].instructions if one.opcode == "FFMA"]
    assert len(patched) == count == 128
    for one in patched:
        sources = {cores._field(one, bit) % 2 for bit in (24, 32, 64)}
        assert len(sources) == banks and one.control.stall == 1 and not one.control.reuse, str(one)


def test_a_patched_stall_count_is_all_that_changes(tmp_path):
    from gpu_accel.hardware.microbenchmarks import cores
    from gpu_accel.hardware.microbenchmarks.compile import build

    cubin, count = cores.patched(cores.CHAIN, "stall-2")
    before = build(cores.CHAIN.source).functions[cores.CHAIN.name].instructions
    after = disassembled(cubin, tmp_path)[cores.CHAIN.name].instructions
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a.encoding != b.encoding]
    assert len(changed) == count == 128
    stalls = [a.control.stall for a, _ in changed]
    # The compiler's is 4, less where an instruction of the loop itself stands between two of the chain.
    assert {b.control.stall for _, b in changed} == {2} and max(stalls) == 4 and stalls.count(4) > 120
    assert all((a.opcode, a.operands) == (b.opcode, b.operands) for a, b in changed)
