"""Operands of products that ptxas overwrites, told apart from those that it makes again, in a few lines of code."""

from __future__ import annotations

import pytest

from gpu_accel.testing.overwritten import (
    lost_descriptors,
    overwritten_operands,
    sums_with_no_address,
    unwritten_registers,
)

PTX = """
$L__BB0_1:
    cvt.f32.f16 %r1, %rs1;
    ld.shared.v2.b32 {{%r2, %r3}}, [%r9];
    {before}
$L__BB0_2:
    {inside}
    wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32 {{%r20,%r21}}, {{%r1,%r2,%r3,%r4}}, %rd1, 0, 1, 1;
    wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32 {{%r20,%r21}}, %rd3, %rd1, 0, 1, 1;
    setp.lt.s32 %p1, %r9, 4;
    @%p1 bra $L__BB0_2;
    ret;
"""
SASS = """
        /*0000*/                   HADD2.F32 R24, -RZ, R24.H0_H0 ;
.L_x_2:
        /*0010*/                   {early} ;
        /*0020*/                   HGMMA.64x16x8.F32.TF32 R40, R24, gdesc[UR4], RZ, !UPT ;
        /*0030*/                   HGMMA.64x16x8.F32.TF32 R40, gdesc[UR4], R40, gsb0 ;
        /*0040*/                   {late} ;
        /*0050*/              @P0 BRA `(.L_x_2) ;
        /*0060*/                   EXIT ;
"""


def found(before="mov.b32 %r4, %r9;", inside="mov.b32 %r5, 0;", early="MOV R9, RZ", late="MOV R9, RZ"):
    return overwritten_operands(PTX.format(before=before, inside=inside), SASS.format(early=early, late=late))


@pytest.mark.parametrize(("late", "register"), [
    ("FSEL R27, R1, R2, !P1", 27), ("LDS.128 R24, [R9]", 24), ("SHFL.BFLY PT, R25, R9, 0x1, 0x1f", 25),
    ("@P3 CS2R R26, SRZ", 26), ("LDSM.16.M88.4 R21, [R9]", 24), ("HGMMA.64x32x8.F32 R12, gdesc[UR8], R12", 24),
])  # fmt: skip
def test_overwritten_after_the_product(late, register):
    sass = SASS.format(early="MOV R9, RZ", late="MOV R9, RZ")
    if "GMMA" in late:  # a third product, which PTX must then have too
        third = "    wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {%r30}, %rd5, %rd1, 0, 1, 1;\n    setp.lt"
        ptx = PTX.format(before="mov.b32 %r4, 0;", inside="").replace("    setp.lt", third)
        end = ";\n        /*0050*/"
        faults = overwritten_operands(ptx, sass.replace(f"MOV R9, RZ {end}", f"{late} {end}"))
    else:
        faults = found(late=late)
    (fault,) = faults
    assert f"R{register} is overwritten" in fault and late.removeprefix("@P3 ") in fault


@pytest.mark.parametrize("late", ["STS.128 [R24], R24", "LDGSTS.E.128 [R24], [R26.64]", "ISETP.NE.AND P1, PT, R25, RZ",
                                  "FADD R28, R24, R25", "R2UR UR4, R24", "LDS.64 R22, [R9]"])  # fmt: skip
def test_registers_that_are_only_read(late):
    assert not found(late=late)


def test_made_again_in_every_turn():
    assert not found(early="LDS.128 R24, [R9]", late="FSEL R27, R1, R2, !P1")


def test_an_operand_of_the_loop_itself():
    assert not found(before="mov.b32 %r6, 0;", inside="mov.b32 %r4, %r9;", late="FSEL R27, R1, R2, !P1")


def test_other_numbers_of_products_say_nothing():
    sass = SASS.format(early="HGMMA.64x16x8.F32.TF32 R40, R24, gdesc[UR4], R40", late="FSEL R27, R1, R2, !P1")
    assert not overwritten_operands(PTX.format(before="mov.b32 %r4, 0;", inside=""), sass)


UNIFORM = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/                   R2UR UR8, R24 ;
        /*0020*/                   UIADD3 UR6, UP0, UR8, 0x2, URZ ;
        /*0030*/                   {one} ;
        /*0040*/                   HGMMA.64x16x16.F32.BF16 R24, R60, gdesc[UR4].tnspB, RZ, !UPT ;
"""


def test_a_descriptor_of_nothing():
    (fault,) = unwritten_registers(UNIFORM.format(one="UIADD3 UR11, UP0, UR10, 0x2, URZ"))
    assert fault == "UIADD3 UR11, UP0, UR10, 0x2, URZ: nothing was ever written to UR10"
    assert unwritten_registers(UNIFORM.format(one="@UP1 ULEA UR11, UR10, UR4, 0x2"))
    for one in ("UIADD3.X UR7, UR5, -0x7fffffe0, URZ, UP0, !UPT", "UMOV UR10, 0x2", "UMOV UR9, UR10", "S2UR UR9, SR_X"):
        assert not unwritten_registers(UNIFORM.format(one=one))
    # written further down, on the way to the turn that reads it
    early = UNIFORM.replace("        /*0020*/", ".L_x_1:\n        /*0020*/").format(one="ULEA UR11, UR10, UR4, 0x2")
    assert unwritten_registers(early)
    end = "        /*0050*/     UMOV UR10, 0x2 ;\n        /*0060*/     @P0 BRA `(.L_x_1) ;\n"
    assert not unwritten_registers(early + end)


def test_one_register_for_both_halves_of_an_address():
    """What ptxas 12.8 made of a base of 32 bits and 0x8000002000000040, and what it should have."""
    lower = "        /*0000*/     UMOV UR4, 0x40 ;\n        /*0010*/     UIADD3 UR18, UP0, UR4, 0x40, URZ ;\n"
    wrong = lower + "        /*0020*/     UIADD3.X UR19, UR4, -0x7fffffe0, URZ, UP0, !UPT ;\n"
    (fault,) = lost_descriptors(wrong)
    assert "UR4 is overwritten" in fault and "UIADD3.X UR19" in fault
    assert not lost_descriptors(wrong.replace("UIADD3.X UR19, UR4", "UIADD3.X UR19, URZ"))
    moved = lower + "        /*0018*/     UMOV UR4, URZ ;\n" + wrong.splitlines()[-1] + "\n"
    assert not lost_descriptors(moved)


SUM = """
        /*0000*/                   ULDC UR4, c[0x0][0x210] ;
        /*0008*/                   UMOV UR7, URZ ;
        /*0010*/                   ULOP3.LUT UR6, UR4, 0x3fff, URZ, 0xc0, !UPT ;
        /*0020*/              @P0 BRA `(.L_x_1) ;
        /*0030*/                   {one} ;
.L_x_1:
        /*0040*/                   UIADD3 UR6, UP0, UR6, 0x20, URZ ;
        /*0050*/                   UIADD3.X UR7, UR7, {constant}, URZ, UP0, !UPT ;
"""


@pytest.mark.parametrize("one", ["@P1 R2UR UR7, R27", "USHF.L.U32 UR7, UR6, 0xb, URZ", "ULDC.64 UR6, c[0x0][0x208]"])
def test_a_sum_with_no_address_in_it(one):
    """What ptxas 12.8 made of packed attention: there the pair held the address of a TMA descriptor, or a barrier."""
    (fault,) = lost_descriptors(SUM.format(one=one, constant="-0x3ffffff0"))
    assert fault.endswith(f"UR7 is no address's upper half but {one}") and "UIADD3.X UR7" in fault
    for none in ("0x10", "-0x1"):  # no tile is swizzled, and no descriptor is a difference
        assert not sums_with_no_address(SUM.format(one=one, constant=none))
    elsewhere = one.replace("UR7", "UR9").replace("UR6", "UR8")
    assert not sums_with_no_address(SUM.format(one=elsewhere, constant="0x40000040"))


def test_a_sum_whose_address_is_made_on_every_way():
    made = SUM.format(one="UMOV UR7, URZ", constant="-0x3ffffff0")
    assert not lost_descriptors(made)
    assert sums_with_no_address(made.replace("UMOV UR7, URZ", "UMOV UR7, UR4", 1))
