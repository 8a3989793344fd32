"""What `quantize_qkv` refuses, and what PyTorch sees of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.testing import quantize as cases
from tilewise.testing.quantize import BY_NAME

X = torch.zeros(2, 3, 4, 8)
CU = torch.tensor([0, 2], dtype=torch.int32)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "scheme": ((X, X, X), {"scheme": "sage2"}, "scheme: got 'sage2'"),
    "no_tensor": ((X, [1.0], X), {}, "k: got list"),
    "rank": ((X[0], X, X), {}, "q: got shape (3, 4, 8)"),
    "float64": ((X.double(), X.double(), X.double()), {}, "q: got torch.float64; expected float16"),
    "integers": ((X.int(), X.int(), X.int()), {}, "q: got torch.int32"),
    "dtypes": ((X, X.half(), X), {}, "k: got torch.float16"),
    "device": ((X, X.to("meta"), X), {}, "k: got device meta"),
    "strides": ((X.mT, X.mT, X.mT), {}, "q: got strides"),
    "heads": ((X, X[:, :, :3], X[:, :, :3]), {}, "k: got 3 heads"),
    "head_dim": ((X, X[..., :4], X), {}, "k: got head_dim 4"),
    "keys": ((X, X, X[:, :2]), {}, "v: got shape (2, 2, 4, 8)"),
    "wide": ((torch.zeros(1, 1, 1, 257),) * 3, {}, "q: got head_dim 257; expected 1 to 256"),
    "wide_v": ((X, X, torch.zeros(2, 3, 4, 300)), {}, "v: got head_dim 300"),
    "no_power_of_2": (
        (X[..., :6],) * 3, {"scheme": tw.FP8(rotate="hadamard")}, "q: got head_dim 6; expected a power of 2",
    ),
    "gradient": ((X, X.clone().requires_grad_(), X), {}, "k: got a tensor that takes a gradient"),
    "layout": ((X, X, X), {"layout": "packed"}, "layout: got str"),
    "packing": ((X[0],) * 3, {"layout": tw.Packed(CU)}, "layout cu_seqlens_q: got first 0, last 2"),
    "rope": ((X, X, X), {"rope": "llama"}, "rope: got str"),
    "positions": ((X, X, X), {"rope": tw.Rope(X[0, :, 0, :4], X[0, :, 0, :4], CU)}, "rope: got 2 positions"),
    "wide_rope": ((X, X, X), {"rope": (None, tw.Rope(X[0, :, 0], X[0, :, 0], torch.arange(6)))}, "got rotary_dim 16"),
    "far": ((X, X, X), {"rope": tw.Rope(X[0, :2, 0, :4], X[0, :2, 0, :4], torch.arange(6))}, "rope: got position 2"),
    "impl": ((X, X, X), {"impl": "cuda"}, "impl: got 'cuda'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    arguments, options, message = BAD[name]
    with pytest.raises(InputError) as caught:
        tw.quantize_qkv(*arguments, **({"scheme": tw.Sage2()} | options))
    assert message in str(caught.value)


def test_kernels_need_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="an NVIDIA GPU"):
        tw.quantize_qkv(X, X, X, scheme=tw.Sage2(), impl="triton")


def test_leaves_are_fine_without_gradients() -> None:
    x = X.clone().requires_grad_()
    with torch.no_grad():
        found = tw.quantize_qkv(x, x, x, scheme=tw.Sage(pv="bf16"))
    assert not any(part.requires_grad for part in (found.q, found.q_scale, found.v))


@pytest.mark.parametrize("name", ["sage2_int4", "fa3", "sage1_packed", "rotated"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    case = BY_NAME[name]

    def step(q: Any, k: Any, v: Any, layout: Any) -> Any:
        x = tw.quantize_qkv(q * 1.0, k, v, scheme=case.scheme, layout=layout)
        return x.q, x.k, x.v, x.q_scale, x.q_bias

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    inputs = cases.make_inputs(case, torch.float32)
    for found, want in zip(compiled(**inputs), step(**inputs), strict=True):
        assert (found is None and want is None) or torch.equal(found.float(), want.float())


def test_the_operator_passes_opcheck() -> None:
    k = torch.randn(1, 70, 2, 8)
    facts = {"side": "k", "kind": "int8", "shared": "thread", "largest": 127.0, "smooth": True, "rotate": False}
    torch.library.opcheck(torch.ops.tilewise.quantize.default, ([k], f"(['x'], {facts})", "cpu"))
