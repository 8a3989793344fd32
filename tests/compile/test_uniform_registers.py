"""The check that products know where their operands are, on disassemblies written by hand."""

from __future__ import annotations

import pytest

from tilewise.ops.uniform_registers import read_unset

LOOPS = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/                   UIADD3 UR10, UR4, 0x1, URZ ;
        /*0020*/              @!P1 BRA `(.L_x_1) ;
        /*0030*/                   {first} ;
.L_x_0:
        /*0040*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0050*/                   UMOV UR18, UR10 ;
        /*0058*/                   UMOV UR22, UR16 ;
        /*0060*/                   UMOV UR19, UR5 ;
        /*0068*/                   UIADD3 UR23, UR22, 0x2, URZ ;
        /*0070*/                   {second} ;
        /*0080*/                   EXIT ;
"""


ONE_OPERAND = "QGMMA.64x128x32.F32.E4M3.E4M3 R88, R164, gdesc[{}], R88"  # in memory; the other is in registers
TWO_OPERANDS = "QGMMA.64x128x32.F32.E4M3.E4M3 R88, gdesc[{}], R88"


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("UIADD3 UR16, UP0, UR10, 0x2, URZ", TWO_OPERANDS.format("UR16"), 1),  # what the first loop sets
        ("UIADD3 UR16, UP0, UR10, 0x2, URZ", ONE_OPERAND.format("UR16"), 0),
        ("UIADD3 UR18, UP0, UR10, 0x2, URZ", ONE_OPERAND.format("UR16"), 0),  # set on both ways
        ("UIADD3 UR16, UP0, UR10, 0x2, URZ", ONE_OPERAND.format("UR20"), 1),  # a copy of the first
        ("R2UR P0, UR16, R7", TWO_OPERANDS.format("UR4"), 1),
        ("UMOV UR12, UR16", "IMAD.U32 R4, RZ, RZ, UR12", 0),  # no address
    ],
)
def test_products_at_addresses_that_are_not_set(first: str, second: str, found: int) -> None:
    assert len(read_unset(LOOPS.format(first=first, second=second))) == found


def test_a_table_of_branches_leads_to_every_role() -> None:
    roles = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/                   BRX R2 -0x20 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*) ;
.L_x_0:
        /*0020*/                   UMOV UR6, UR4 ;
        /*0030*/                   EXIT ;
.L_x_1:
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR4], R24 ;
        /*0050*/                   EXIT ;
"""
    assert [line.split(":")[0] for line in read_unset(roles)] == ["0040"]


def test_a_branch_of_threads_that_part_leads_on() -> None:
    parting = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/                   UMOV UR6, UR4 ;
        /*0018*/                   UMOV UR7, UR4 ;
        /*0020*/                   BRA.DIV UR4, `(.L_x_1) ;
.L_x_0:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0040*/                   EXIT ;
.L_x_1:
        /*0050*/                   WARPSYNC.ALL ;
        /*0060*/                   BRA `(.L_x_0) ;
"""
    assert read_unset(parting.replace("BRA.DIV UR4, `(.L_x_1)", "NOP")) == []
    assert read_unset(parting) == []
    assert len(read_unset(parting.replace("UMOV UR7, UR4", "NOP"))) == 1
