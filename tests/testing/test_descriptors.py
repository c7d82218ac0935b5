"""A descriptor set in front of one of two loops only, told apart from one set for both, in a few lines of code."""

from __future__ import annotations

import pytest

from gpu_accel.testing.descriptors import descriptors_of_two_origins

SASS = """
        /*0000*/                   UIADD3 UR4, UR9, 0xff, URZ ;
        /*0010*/                   UIADD3.64 UR6, UR8, 0x2, URZ ;
        /*0020*/                   {early} ;
        /*0030*/              @!P2 BRA `(.L_x_2) ;
        /*0040*/                   {inside} ;
.L_x_1:
        /*0050*/                   HGMMA.64x64x16.F32 R24, R8, gdesc[UR4], R24, gsb0 ;
        /*0060*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0070*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R88, {operand}gdesc[UR4], RZ, !UPT ;
        /*0080*/                   UMOV UR5, UR30 ;
        /*0090*/              @P0 BRA `(.L_x_2) ;
        /*00a0*/                   EXIT ;
"""


def found(early="UMOV UR5, URZ", inside="NOP", operand=""):
    return descriptors_of_two_origins(SASS.format(early=early, inside=inside, operand=operand))


def test_what_reaches_the_second_loop_on_one_way_only():
    assert [x[:12] for x in found()] == ["UR5 of QGMMA"]  # which the loop sets anew
    assert [x[:12] for x in found(inside="UMOV UR4, UR6")] == ["UR4 of QGMMA", "UR5 of QGMMA"]
    assert len(found(inside="UIADD3.64 UR6, UR6, 0x4, URZ", operand="R164, ")) == 2


@pytest.mark.parametrize("inside", ["NOP", "UMOV UR9, UR6", "MOV R4, UR4", "ULDC UR12, c[0x0][0x588]"])
def test_what_does_not_touch_the_descriptor(inside):
    assert not found(inside=inside, operand="R164, ")


def test_left_operands_in_registers_have_no_descriptor():
    assert not found(inside="UMOV UR4, UR6", operand="R164, ")
