"""Cases of `rope`, what PyTorch makes of them, and the bits that every implementation shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tilewise.ops.operation import Operation
from tilewise.ops.rope.problem import make_call
from tilewise.ops.rope.table import ROPE
from tilewise.rotary import rotated
from tilewise.testing import operators

Tensors = dict[str, torch.Tensor]
FARTHEST = 1000


@dataclass(frozen=True)
class TurnCase:
    """Tokens of shape `lead`; heads of q and k, none of k for q alone. `memory` is "" for contiguous rows, "joint" for
    parts of one projection, "HND" for heads before tokens, "strided" for a stride in head_dim.
    """

    name: str
    lead: tuple[int, ...] = (2, 5)
    heads_q: int = 4
    heads_k: int = 2
    dim: int = 16
    rotary_dim: int = 16
    interleaved: bool = False
    table: torch.dtype = torch.float32
    memory: str = ""
    index: torch.dtype = torch.int64

    def __repr__(self) -> str:
        return self.name


CASES = [
    TurnCase("batch"),
    TurnCase("neighbours", interleaved=True),
    TurnCase("packed", (11,), index=torch.int32),
    TurnCase("q_alone", heads_k=0),
    TurnCase("one_token", (1, 1), 1, 1, 64, 64),
    TurnCase("many_tokens", (3, 167), 2, 1, 8, 8),
    TurnCase("narrowest", (5,), 3, 1, 2, 2),
    TurnCase("part", dim=24, rotary_dim=8),
    TurnCase("part_of_odd", (7,), 3, 5, 7, 6),
    TurnCase("part_of_neighbours", (7,), 3, 5, 7, 6, True),
    TurnCase("width_1000", (3,), 10, 2, 100, 100),
    TurnCase("odd_heads", (4, 3), 5, 3, 40, 40),
    TurnCase("more_keys", (9,), 1, 6, 32, 32),
    TurnCase("joint", (3, 7), 4, 2, 32, 32, memory="joint"),
    TurnCase("joint_packed", (9,), 4, 2, 32, 16, True, memory="joint"),
    TurnCase("heads_first", (2, 9), 3, 2, 32, 32, memory="HND"),
    TurnCase("strided", (2, 9), 3, 2, 8, 8, memory="strided"),
    TurnCase("table_of_16_bits", (6,), table=torch.bfloat16),
    TurnCase("table_of_64_bits", (6,), 2, 0, interleaved=True, table=torch.float64),
    TurnCase("large", (2,), 2, 1, 1536, 1536),
]
BY_NAME = {case.name: case for case in CASES}


def laid(case: TurnCase, x: torch.Tensor) -> torch.Tensor:
    """A copy of x (*lead, heads, dim) that lies as the case says."""
    if case.memory == "joint":
        return torch.cat((x, x[..., :1, :]), -2)[..., :-1, :]
    if case.memory == "HND":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    return x.repeat_interleave(2, -1)[..., ::2] if case.memory == "strided" else x.clone()


def make_inputs(case: TurnCase, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensors:
    """q, k, cos, sin and positions, the farthest and 0 among them."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for name, heads in (("q", case.heads_q), ("k", case.heads_k)):
        if heads:
            x = torch.randn(*case.lead, heads, case.dim, generator=generator)
            inputs[name] = laid(case, x.to(device, dtype)).requires_grad_()
    half = case.rotary_dim // 2
    frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(FARTHEST + 1, dtype=torch.float64), frequency)
    both = torch.cat((angle.cos(), angle.sin()), 1).to(device, case.table)
    positions = torch.randint(0, FARTHEST + 1, (torch.Size(case.lead).numel(),), generator=generator)
    positions[1::4], positions[2::4] = 0, FARTHEST
    cos, sin = both.chunk(2, 1)  # rows of one table
    return inputs | {"cos": cos, "sin": sin, "positions": positions.to(device, case.index)}


def ours(case: TurnCase, impl: str | None) -> operators.Function:
    """The function under test, of what `make_inputs` gives."""

    def call(q: torch.Tensor, cos: Any, sin: Any, positions: Any, k: torch.Tensor | None = None) -> Any:
        rope = tw.Rope(cos, sin, positions, case.interleaved)
        return tw.rope(laid(case, q), None if k is None else laid(case, k), rope=rope, impl=impl)

    return call


def plain(case: TurnCase) -> operators.Function:
    """The same in PyTorch, at any dtype: products of complex numbers for neighbours, Llama's halves else."""

    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        head, rest = x[..., : case.rotary_dim], x[..., case.rotary_dim :]
        wide = head.to(torch.promote_types(x.dtype, torch.float32))
        cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
        if case.interleaved:
            pairs = torch.view_as_complex(wide.reshape(*wide.shape[:-1], case.rotary_dim // 2, 2).contiguous())
            turned = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
        else:
            a, b = wide.chunk(2, -1)
            turned = wide * torch.cat((cos, cos), -1) + torch.cat((-b, a), -1) * torch.cat((sin, sin), -1)
        return torch.cat((turned.to(x.dtype), rest), -1)

    def call(q: torch.Tensor, cos: Any, sin: Any, positions: Any, k: torch.Tensor | None = None) -> Any:
        angles = [table[positions].view(*case.lead, 1, case.rotary_dim // 2) for table in (cos, sin)]
        return turn(q, *angles) if k is None else (turn(q, *angles), turn(k, *angles))

    return call


def check(case: TurnCase, dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    """`case` is as near to the truth as it must be, bit for bit what `kv_write` makes of keys, also in place; what is
    not turned is as it was.
    """
    inputs = make_inputs(case, dtype, device)
    found = ours(case, impl)
    operators.check(found, plain(case), inputs, dict.fromkeys(("out0", "out1", "dq", "dk"), 2.0))
    rope = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"], case.interleaved)
    got = operators.results(found, inputs)
    for n, name in enumerate(name for name in ("q", "k") if name in inputs):
        x = inputs[name].detach()
        want = rotated(x.flatten(0, -3), rope).to(dtype).view(x.shape)
        assert torch.equal(got[f"out{n}"], want), f"{name}: other bits"
        assert torch.equal(got[f"out{n}"][..., case.rotary_dim :], x[..., case.rotary_dim :])
        assert got[f"out{n}"].is_contiguous()
    if case.memory != "strided":
        _in_place(case, inputs, rope, impl, got)


def _in_place(case: TurnCase, inputs: Tensors, rope: tw.Rope, impl: str, got: Tensors) -> None:
    given = [laid(case, inputs[name].detach()) for name in ("q", "k") if name in inputs]
    versions = [x._version for x in given]
    back = tw.rope(*given, rope=rope, inplace=True, impl=impl)
    for n, (x, returned) in enumerate(zip(given, (back,) if isinstance(back, torch.Tensor) else back, strict=True)):
        assert returned is x
        assert torch.equal(x, got[f"out{n}"]), "in place: other bits"
        assert x._version > versions[n] or not x.numel(), "in place: autograd is not told"


def joint_inputs(case: TurnCase, dtype: torch.dtype, device: str = "cpu") -> Tensors:
    """What `make_inputs` gives, q and k side by side with values in one tensor qkv."""
    inputs = make_inputs(case, dtype, device)
    q, k = (inputs.pop(name).detach() for name in ("q", "k"))
    return {"qkv": torch.cat((q, k, k.flip(0, -1)), -2).requires_grad_()} | inputs


def joint(case: TurnCase, impl: str | None) -> operators.Function:
    """The function under test, of what `joint_inputs` gives."""

    def call(qkv: torch.Tensor, cos: Any, sin: Any, positions: Any) -> Any:
        rope = tw.Rope(cos, sin, positions, case.interleaved)
        return tw.rope_qkv(laid(case, qkv), case.heads_q, case.heads_k, rope=rope, impl=impl)

    return call


def check_joint(case: TurnCase, dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    """`rope_qkv` is as near to the truth as it must be and has the bits of `rope`, forward and backward; values are a
    view, and their gradient is what came in.
    """

    heads = [case.heads_q, case.heads_k, case.heads_k]

    def plainly(qkv: torch.Tensor, **angles: Any) -> Any:
        # copied: a complex number may not begin at an odd place
        q, k, v = (x.clone() for x in torch.split(qkv, heads, -2))
        return *plain(case)(q=q, k=k, **angles), v

    inputs = joint_inputs(case, dtype, device)
    operators.check(joint(case, impl), plainly, inputs, dict.fromkeys(("out0", "out1", "dqkv"), 2.0))

    angles = tw.Rope(inputs["cos"], inputs["sin"], inputs["positions"], case.interleaved)
    qkv = laid(case, inputs["qkv"].detach()).requires_grad_()
    parts = torch.split(qkv, heads, -2)
    got = tw.rope_qkv(qkv, case.heads_q, case.heads_k, rope=angles, impl=impl)
    want = (*tw.rope(*parts[:2], rope=angles, impl=impl), parts[2])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), "other bits than those of the parts"
    assert got[0].is_contiguous()
    assert got[1].is_contiguous()
    assert (got[2].data_ptr(), got[2].stride()) == (parts[2].data_ptr(), parts[2].stride()), "values are copied"
    # of values what came in lies otherwise than of keys
    incoming = [laid(case, got[0].detach()), laid(case, got[1].detach()), got[2].detach().contiguous()]
    gradients = [torch.autograd.grad(out, qkv, incoming)[0] for out in (got, want)]
    assert torch.equal(*gradients), "dqkv: other bits than those of the parts"
    assert gradients[0].is_contiguous()


def _variant(case: TurnCase) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        """Heads of 128, or of 100, side by side."""
        dim = 128 if width % 128 == 0 else 100
        table = torch.zeros(64, dim * case.rotary_dim // case.dim // 2)
        rope = tw.Rope(table, table, torch.zeros(64, dtype=torch.int64), case.interleaved)
        q, k = (torch.zeros(64, n, dim, dtype=dtype, requires_grad=True) for n in (width // dim, width // dim // 4))
        return ROPE, make_call(q, k if case.heads_k else None, rope)

    return make


def _side_by_side(case: TurnCase) -> Callable[[int, torch.dtype], tuple[Any, ...]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Any, ...]:
        """As those of `_variant`, with one gradient for q, k and v."""
        operation, call = _variant(case)(width, dtype)
        lead, dim = call.positions.shape, call.dim
        incoming = [torch.zeros(*lead, n, dim, dtype=dtype) for n in (call.heads_q, call.heads_k, call.heads_k)]
        return operation, call, ("qkv",), incoming

    return make


VARIANTS: dict[str, Callable[[int, torch.dtype], tuple[Any, ...]]] = {
    "halves": _variant(TurnCase("")),
    "neighbours": _variant(TurnCase("", interleaved=True)),
    "part": _variant(TurnCase("", rotary_dim=8)),
    "q alone": _variant(TurnCase("", heads_k=0)),
    "side by side": _side_by_side(TurnCase("")),
    "neighbours side by side": _side_by_side(TurnCase("", interleaved=True)),
}
