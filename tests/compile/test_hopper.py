"""What the Hopper kernels owe to the order of their instructions, which the assembler may change."""

from __future__ import annotations

import re

import pytest
import torch

import tilewise as tw
from tilewise.ops.attention import gluon_attention
from tilewise.ops.attention.problem import make_call
from tilewise.testing.offline import compiling_for, exponentials_in_flight
from tools.kernel_resources import Variant, variants

VARIANTS = [variant for variant in variants() if variant.row == "hopper" and variant.quick]
BACKWARD = [v for v in VARIANTS if v.head_dim <= 128 and v.formula != "dropout"]  # of the others the portable is taken
COLUMNS = 128  # keys of a tile: each of 128 threads has 64 * COLUMNS / 128 probabilities of it


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_exponentials_run_beside_products(variant: Variant) -> None:
    with torch.no_grad(), compiling_for(90) as kernels:
        gluon_attention.forward(variant.call())
    kernel = kernels[-1]
    columns = COLUMNS if variant.head_dim <= 128 else COLUMNS // 2
    beside = [count for count in exponentials_in_flight(kernel) if count >= 64 * columns // 128]
    assert len(beside) >= 2, "two warpgroups compute at least"
    assert "wgmma.mma_async" in kernel.asm["ptx"]


@pytest.mark.parametrize("variant", BACKWARD, ids=str)
def test_exponentials_of_the_backward_run_beside_products(variant: Variant) -> None:
    call = variant.call()
    o, lse = call.new_output(), call.new_lse()
    with compiling_for(90) as kernels:
        gluon_attention.backward(call, o, lse, torch.empty_like(o), None)
    kernel = next(kernel for kernel in kernels if kernel.metadata.name == "attention_bwd_sm90")
    queries = 64 if variant.head_dim > 64 else 128
    beside = [count for count in exponentials_in_flight(kernel) if count >= 64 * queries // 128]
    loops = 1 if variant.formula == "plain" else 2  # tiles that the mask cuts, and the others
    assert len(beside) >= 2 * loops, "each of two warpgroups takes them while dP is being computed"


def test_a_sum_of_a_tile_is_added_once() -> None:
    q, k, v = (torch.randn(1, 256, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2, requires_grad=True)
    call = make_call(q, k, v, mask=tw.causal, score=tw.alibi(slopes))
    o, lse = call.new_output(), call.new_lse()
    with compiling_for(90) as kernels:
        gluon_attention.backward(call, o, lse, torch.empty_like(o), None)
    kernel = next(kernel for kernel in kernels if kernel.metadata.name == "attention_bwd_sm90")
    steps = 3  # the first tile, those that the mask cuts, and the others, in each of two warpgroups
    added = re.findall(r"(?:atom|red)\.global\.gpu\.relaxed\.add\.f32", kernel.asm["ptx"])
    assert len(added) == 2 * steps


@pytest.mark.parametrize("variant", [v for v in BACKWARD if v.formula != "plain"], ids=str)
def test_each_item_of_a_program_has_bounds_of_its_own(variant: Variant) -> None:
    """Loops over tiles end where the item says: MLIR takes what only bounds loops for a thing that never changes."""
    call = variant.call()
    o, lse = call.new_output(), call.new_lse()
    with compiling_for(90) as kernels:
        gluon_attention.forward(call)
        gluon_attention.backward(call, o, lse, torch.empty_like(o), None)
    loops = [bounds for kernel in kernels for bounds in _bounds_of_inner_loops(kernel.asm["ttgir"])]
    assert len(loops) >= 6
    assert all(known >= begun for begun, known in loops)


def _bounds_of_inner_loops(ir: str) -> list[tuple[int, int]]:
    """Of each loop inside a loop: lines where the outer one begins and where the last value that bounds the inner one
    becomes known.
    """
    known: dict[str, int] = {}
    around: list[tuple[int, int]] = []  # indentation and line
    found = []
    for number, line in enumerate(ir.splitlines()):
        indent = len(line) - len(line.lstrip())
        while around and indent <= around[-1][0]:
            around.pop()
        loop = re.search(r"scf\.for %\w+ = (%\w+) to (%\w+) ", line)
        if loop:
            if around:
                found.append((around[-1][1], max(known[name] for name in loop.groups())))
            around.append((indent, number))
            known.update(dict.fromkeys(re.findall(r"(%\w+) =", line), number))
        elif line.lstrip().startswith("%"):
            known[line.split("=")[0].split(":")[0].strip()] = number
    return found
