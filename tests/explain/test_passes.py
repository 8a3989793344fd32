"""What PyTorch's operators read and write, counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tilewise.explain.neighbours import NEIGHBOURS, backward_of, forward_of, outputs_of, placed
from tilewise.explain.passes import Pass, moved, passes, size, table


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_every_operator_reads_its_operands_and_writes_its_result() -> None:
    x, weight = empty(6, 10), empty(10)
    found = passes(lambda: (x.float() * weight).to(torch.bfloat16))
    assert found == [Pass("_to_copy", 120, 240), Pass("mul", 240 + 20, 240), Pass("_to_copy", 240, 120)]
    assert moved(found) == 120 + 240 + 260 + 240 + 240 + 120


def test_views_and_memory_that_nobody_writes_are_no_passes() -> None:
    x = empty(6, 10)
    assert passes(lambda: (x.view(60), x.t(), x[2:], x.chunk(2, -1), torch.empty(3), torch.empty_like(x))) == []
    assert passes(lambda: x.t().contiguous()) == [Pass("clone", 120, 120)]


def test_an_operand_given_twice_is_read_once_and_an_expanded_one_has_no_more_than_its_memory() -> None:
    x = empty(6, 10)
    assert passes(lambda: x + x) == [Pass("add", 120, 120)]
    assert passes(lambda: x + empty(1).expand(6, 10)) == [Pass("add", 122, 120)]
    assert size(x, x[:2]) == 120 + 40


def test_in_place_reads_and_writes() -> None:
    x = empty(6, 10)
    assert passes(lambda: x.add_(1.0)) == [Pass("add_", 120, 120)]


def test_the_backward_is_counted_where_it_runs() -> None:
    x = empty(6, 10).requires_grad_()
    o = F.silu(x)
    found = passes(lambda: torch.autograd.grad(o, x, torch.empty_like(o)))
    assert found == [Pass("silu_backward", 240, 120)]


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_no_operation_of_pytorch_moves_less_than_what_is_called_least(name: str) -> None:
    neighbour = NEIGHBOURS[name]
    inputs = placed(neighbour.make(64, 512), "cpu", torch.bfloat16)

    def plain(**x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return outputs_of(neighbour.plain(*x.values()))

    least = size(inputs["x"])
    forward = moved(passes(forward_of(plain, inputs)))
    assert forward >= neighbour.forward * least
    call = backward_of(plain, inputs)
    call()
    assert moved(passes(call)) >= neighbour.backward * least


def test_the_least_is_what_goes_in_and_comes_out() -> None:
    """Weights, angles and statistics aside, which are small beside rows."""
    for name, neighbour in NEIGHBOURS.items():
        inputs = placed(neighbour.make(64, 512), "cpu", torch.float32)
        results = outputs_of(neighbour.plain(*inputs.values()))
        rows = [x for x in (*inputs.values(), *results) if x.ndim > 1]
        assert size(*rows) == neighbour.forward * size(inputs["x"]), name


def test_the_table_has_a_line_for_each_pass_and_their_sum() -> None:
    text = table([Pass("add", 200, 100), Pass("mul", 50, 100)], 100)
    assert text.splitlines()[1].split() == ["add", "2.00", "1.00"]
    assert text.splitlines()[-1].split() == ["2", "passes", "2.50", "2.00"]
