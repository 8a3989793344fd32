"""The SDPA adapter against PyTorch's scaled_dot_product_attention, over its arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import bias

import tilewise as tw
from tests.adapters.dense import as_double, as_leaves, assert_close, dense, leaves
from tilewise.adapters import sdpa
from tilewise.core.errors import InputError

TORCH = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    F.scaled_dot_product_attention = TORCH


def compare(tensors: list[torch.Tensor], mask: torch.Tensor | None = None, **options: Any) -> None:
    """Forward and gradients against PyTorch's in float64, within PyTorch's own error."""
    masks: list[torch.Tensor] = [mask] if mask is not None and mask.requires_grad else []

    def run(function: Any, inputs: list[torch.Tensor], given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        wide = mask if mask is None or mask.dtype == torch.bool else mask.to(inputs[0].dtype)
        o = function(*inputs, attn_mask=given[0] if given else wide, **options)
        return (o, *torch.autograd.grad(o.square().sum(), inputs + given))

    ours = run(sdpa.scaled_dot_product_attention, tensors, masks)
    reference = run(TORCH, as_double(tensors), as_double(masks))
    plain = run(TORCH, as_leaves(tensors), as_leaves(masks))
    names = ("o", "dq", "dk", "dv", "dmask")
    for what, x, exact, same in zip(names, ours, reference, plain, strict=False):
        assert_close(x, exact, same, what)


SHAPES = {
    "4-D": ((2, 4, 33, 16), (2, 4, 33, 16), (2, 4, 33, 16)),
    "more keys": ((2, 4, 20, 16), (2, 4, 150, 16), (2, 4, 150, 8)),
    "more queries": ((1, 2, 150, 16), (1, 2, 20, 16), (1, 2, 20, 16)),
    "one query": ((2, 4, 1, 16), (2, 4, 33, 16), (2, 4, 33, 16)),
    "3-D": ((3, 21, 8), (3, 30, 8), (3, 30, 8)),
    "2-D": ((21, 8), (30, 8), (30, 8)),
    "5-D": ((2, 3, 2, 21, 8), (2, 3, 2, 30, 8), (2, 3, 2, 30, 8)),
    "broadcast batch": ((3, 2, 21, 8), (1, 2, 30, 8), (1, 2, 30, 8)),
}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2, "is_causal": True}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_mask(shape: str, options: dict[str, Any]) -> None:
    compare(leaves(*SHAPES[shape]), **options)


def mask_shapes(full: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every way to broadcast the last four dimensions of `full`, and with fewer dimensions."""
    for keep in itertools.product((False, True), repeat=min(4, len(full))):
        yield tuple(n if k else 1 for n, k in zip(full[-len(keep) :], keep, strict=True))
    yield full[-2:]


@pytest.mark.parametrize("shape", ["4-D", "more keys", "3-D", "5-D"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_broadcast(shape: str, kind: str) -> None:
    tensors = [x.detach() for x in leaves(*SHAPES[shape])]
    full = (*tensors[0].shape[:-1], tensors[1].shape[-2])
    generator = torch.Generator().manual_seed(3)
    for size in mask_shapes(full):
        mask = torch.randn(size, generator=generator)
        mask = mask > -0.5 if kind == "bool" else mask
        ours = sdpa.scaled_dot_product_attention(*tensors, attn_mask=mask)
        wide = mask if kind == "bool" else mask.double()
        reference = TORCH(*(x.double() for x in tensors), attn_mask=wide)
        assert_close(ours, reference, TORCH(*tensors, attn_mask=mask), str(size))


@pytest.mark.parametrize("shape", [(2, 4, 20, 33), (1, 4, 1, 33), (20, 33), (2, 1, 20, 1)], ids=str)
def test_gradients_with_masks(shape: tuple[int, ...]) -> None:
    tensors = leaves((2, 4, 20, 16), (2, 4, 33, 16), (2, 4, 33, 16))
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    visible = mask > -0.5
    if visible.shape[-1] > 1:
        visible[..., 0] = True  # PyTorch's gradients of empty rows differ by version
    compare(tensors, visible)
    compare(tensors, mask.requires_grad_())
    hidden = mask.detach().masked_fill(~visible, -torch.inf)
    if visible.shape[-1] > 1:
        compare(tensors, hidden)


@pytest.mark.parametrize("sizes", [(7, 7), (4, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("corner", [bias.causal_upper_left, bias.causal_lower_right], ids=lambda f: f.__name__)
def test_causal_biases_are_masks(corner: Any, sizes: tuple[int, int]) -> None:
    tensors = [x.detach() for x in leaves((1, 2, sizes[0], 8), (1, 2, sizes[1], 8), (1, 2, sizes[1], 8))]
    mask = corner(*sizes)
    keep = torch.ones(sizes, dtype=torch.bool).tril(0 if corner is bias.causal_upper_left else sizes[1] - sizes[0])
    expected, plain = (dense(*(x.to(dtype) for x in tensors), keep)[0] for dtype in (torch.float64, torch.float32))
    assert_close(sdpa.scaled_dot_product_attention(*tensors, attn_mask=mask), expected, plain)
    with pytest.raises(InputError, match="causal bias"):
        sdpa.scaled_dot_product_attention(*tensors, attn_mask=corner(3, 3))


def test_rows_that_see_nothing_give_zero() -> None:
    tensors = leaves((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    visible = torch.ones(5, 7, dtype=torch.bool)
    visible[2] = False
    for mask in (visible, torch.where(visible, 0.5, -torch.inf)):
        o = sdpa.scaled_dot_product_attention(*tensors, attn_mask=mask)
        assert bool((o[:, :, 2] == 0).all())
        assert bool((o[:, :, 1] != 0).any())
        grads = torch.autograd.grad(o.square().sum(), tensors)
        assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_heads(masked: bool) -> None:
    tensors = leaves((2, 6, 20, 16), (2, 2, 33, 16), (2, 2, 33, 16))
    mask = torch.randn(2, 6, 20, 33, generator=torch.Generator().manual_seed(1)) > -0.5 if masked else None
    compare(tensors, mask, enable_gqa=True)
    with pytest.raises(InputError, match="enable_gqa"):
        sdpa.scaled_dot_product_attention(*tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    tensors = [x.detach().to(dtype) for x in leaves((1, 2, 40, 16), (1, 2, 50, 16), (1, 2, 50, 16))]
    mask = torch.randn(40, 50).to(dtype)
    for given in (None, mask, mask > 0):
        wide = given.double() if given is not None and given.dtype != torch.bool else given
        reference = TORCH(*(x.double() for x in tensors), attn_mask=wide)
        ours = sdpa.scaled_dot_product_attention(*tensors, attn_mask=given)
        assert_close(ours, reference, TORCH(*tensors, attn_mask=given))


def test_dropout_keeps_the_mean() -> None:
    q, k = (x.detach() for x in leaves((1, 1, 64, 8), (1, 1, 256, 8)))
    v = torch.ones(1, 1, 256, 8)
    torch.manual_seed(0)
    runs = torch.stack([sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.25) for _ in range(20)])
    assert not torch.equal(runs[0], runs[1])
    # each output is 1 plus noise of variance sum(p^2) / 3 at most: the mean of 20 * 64 rows is well within 0.02
    assert abs(float(runs.mean()) - 1.0) < 0.02
    assert float(runs.std()) > 0.01


def test_autocast_casts_like_pytorch() -> None:
    tensors = [x.detach() for x in leaves((1, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sdpa.scaled_dot_product_attention(*tensors).dtype == TORCH(*tensors).dtype == torch.bfloat16


def test_dropout_of_every_weight_gives_zero() -> None:
    tensors = leaves((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8), (5, 7))
    results = [function(*tensors[:3], attn_mask=tensors[3], dropout_p=1.0)
               for function in (sdpa.scaled_dot_product_attention, TORCH)]  # fmt: skip
    for o in results:
        assert bool((o == 0).all())
        assert all(bool((g == 0).all()) for g in torch.autograd.grad(o.sum(), tensors))


EMPTY: dict[str, tuple[tuple[int, ...], int, int, tuple[int, ...]]] = {
    "no keys, (1, 0)": ((1, 2), 3, 0, (1, 0)),
    "no keys, (3, 0)": ((1, 2), 3, 0, (3, 0)),
    "no queries, (0, 1)": ((1, 2), 0, 5, (0, 1)),
    "neither, (0,)": ((1, 2), 0, 0, (0,)),
    "no batch": ((0, 2), 3, 5, (0, 1, 1, 5)),
    "5-D, no queries": ((2, 3, 2), 0, 5, (2, 3, 2, 0, 5)),
    "5-D, no keys": ((2, 3, 2), 4, 0, (2, 1, 1, 4, 0)),
    "5-D, no batch": ((2, 0, 2), 4, 5, (2, 0, 1, 4, 5)),
}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", EMPTY)
def test_masks_over_nothing(name: str, kind: str) -> None:
    lead, seqlen_q, seqlen_k, shape = EMPTY[name]
    tensors = leaves((*lead, seqlen_q, 8), (*lead, seqlen_k, 8), (*lead, seqlen_k, 8))
    o = sdpa.scaled_dot_product_attention(*tensors, attn_mask=torch.ones(shape, dtype=getattr(torch, kind)))
    assert o.shape == (*lead, seqlen_q, 8)
    assert all(bool((x == 0).all()) for x in (o, *torch.autograd.grad(o.sum(), tensors)))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_compile_in_one_graph(kind: str) -> None:
    tensors = [x.detach() for x in leaves((2, 4, 20, 16), (2, 4, 33, 16), (2, 4, 33, 16))]
    mask = torch.randn(20, 33, generator=torch.Generator().manual_seed(1))
    mask = mask > -0.5 if kind == "bool" else mask.masked_fill(mask < -0.5, -torch.inf)
    compiled = torch.compile(sdpa.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    expected = sdpa.scaled_dot_product_attention(*tensors, attn_mask=mask)
    torch.testing.assert_close(compiled(*tensors, attn_mask=mask), expected)


def test_a_mask_that_is_a_parameter_compiles_with_dynamic_sizes() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.nn.Parameter(torch.randn(4, 20, 20, generator=torch.Generator().manual_seed(0)))

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return sdpa.scaled_dot_product_attention(q, q, q, attn_mask=self.mask)

    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 3):
        (q,) = leaves((batch, 4, 20, 8))
        torch.testing.assert_close(compiled(q), layer(q))


def test_bad_input() -> None:
    q, k, v = (x.detach() for x in leaves((1, 2, 8, 8), (1, 2, 9, 8), (1, 2, 9, 8)))
    mask = torch.zeros(8, 9)
    for name, arguments in {
        "attn_mask": {"attn_mask": mask, "is_causal": True},
        "broadcastable": {"attn_mask": torch.zeros(9, 8)},
        "floating": {"attn_mask": mask.int()},
        "dropout": {"dropout_p": 1.5},
        "dropout: got 'x'": {"dropout_p": "x"},
        "attn_mask: got list": {"attn_mask": [1]},
    }.items():
        with pytest.raises(InputError, match=name) as caught:
            sdpa.scaled_dot_product_attention(q, k, v, **arguments)
        assert caught.value.hint
    with pytest.raises(InputError, match="query: got list"):
        sdpa.scaled_dot_product_attention([1], 2, 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"value: got shape \(8,\)"):
        sdpa.scaled_dot_product_attention(q, k, v[0, 0, 0])
    jagged = torch.nested.nested_tensor([torch.zeros(n, 2, 8) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(InputError, match="key: got a nested tensor"):
        sdpa.scaled_dot_product_attention(q, jagged, v)
    with pytest.raises(InputError, match="broadcast"):
        sdpa.scaled_dot_product_attention(q, k[:, :1].expand(-1, 3, -1, -1), v)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of q in every call of tilewise.attention."""
    seen: list[tuple[int, ...]] = []
    original = tw.attention

    def counted(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(tuple(q.shape))
        return original(q, *args, **kwargs)

    monkeypatch.setattr(tw, "attention", counted)
    return seen


def test_install_runs_pytorchs_own_modules(calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 10, 32)
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[1, 7:] = True
    causal = torch.nn.Transformer.generate_square_subsequent_mask(10)
    for arguments in ({}, {"src_key_padding_mask": padding}, {"src_mask": causal, "is_causal": True}):
        before = layer(x, **arguments)
        assert calls == []
        with sdpa.installed():
            torch.testing.assert_close(layer(x, **arguments), before, rtol=0, atol=2e-6)
        assert calls == [(2, 10, 4, 8)]
        calls.clear()


def test_install_and_uninstall() -> None:
    sdpa.install()
    sdpa.install()
    assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    sdpa.uninstall()
    assert F.scaled_dot_product_attention is TORCH
    sdpa.uninstall()
    assert F.scaled_dot_product_attention is TORCH


def test_installed_nests_and_survives_exceptions() -> None:
    def leave_by_exception() -> None:
        with sdpa.installed():
            with sdpa.installed():
                pass
            assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
            raise KeyError

    with pytest.raises(KeyError):
        leave_by_exception()
    assert F.scaled_dot_product_attention is TORCH
    sdpa.install()
    with sdpa.installed():
        pass
    assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    sdpa.uninstall()
    assert F.scaled_dot_product_attention is TORCH


def test_install_replaces_another_librarys_replacement_and_gives_it_back() -> None:
    def other(*args: Any, **kwargs: Any) -> torch.Tensor:
        return TORCH(*args, **kwargs)

    F.scaled_dot_product_attention = other
    with sdpa.installed():
        assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_most_negative_number_hides(dtype: torch.dtype) -> None:
    """As masks are written that must not hold infinities; in base 2 it would leave float32."""
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=dtype) for _ in range(3))
    seen = torch.rand(40, 40) < 0.5
    seen[3] = False
    least = torch.zeros(40, 40, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    infinite = torch.zeros(40, 40, dtype=dtype).masked_fill(~seen, -torch.inf)
    o, wanted = (sdpa.scaled_dot_product_attention(q, k, v, attn_mask=mask) for mask in (least, infinite))
    assert torch.equal(o, wanted)
    assert not o[:, :, 3].any()
    mask, _score = sdpa.formula_of(least, (1, 2), 40, 40)
    zero = torch.tensor(0)
    assert torch.equal(mask.evaluate(b=zero, h=zero, i=torch.arange(40)[:, None], j=torch.arange(40)), seen)
