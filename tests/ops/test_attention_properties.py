"""Determinism, independence and equivalences, of every CPU implementation, forward and backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.core.errors import FormulaError
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES, LENGTHS
from tilewise.testing.inputs import make_inputs
from tilewise.testing.matrix import PROPERTIES, Check, name_of, property_matrix, runnable
from tilewise.testing.properties import Setting, can_run

IMPLS = ("cpu_sdpa", "cpu_tiled", "reference")
DTYPES = (torch.float32, torch.bfloat16)
MATRIX = property_matrix(IMPLS, DTYPES)


@pytest.mark.parametrize(("check", "setting", "case"), MATRIX, ids=name_of)
def test_property(check: Check, setting: Setting, case: Case) -> None:
    check(setting, case)


def test_every_property_is_checked_on_the_tiled_path() -> None:
    checked = {(check, setting.impl) for check, setting, _ in MATRIX}
    assert {check for check, impl in checked if impl == "cpu_tiled"} == set(PROPERTIES)
    assert len({check for check, impl in checked if impl == "cpu_sdpa"}) >= 6


def _keep(case: Case, function: Callable[..., Any]) -> torch.Tensor:
    i = torch.arange(case.seqlen_k - case.seqlen_q, case.seqlen_k)[:, None]
    return function(i, torch.arange(case.seqlen_k)).expand(case.seqlen_q, case.seqlen_k)


SPELLINGS: dict[str, list[Callable[[Case], dict[str, Any]]]] = {
    "causal": [
        lambda case: {"mask": lambda b, h, i, j: ~(j > i)},
        lambda case: {"mask": tw.window(None)},
        lambda case: {"mask": tw.causal & tw.causal},
        lambda case: {"mask": tw.explicit(_keep(case, lambda i, j: j <= i))},
        lambda case: {"mask": tw.causal, "score": lambda s, b, h, i, j: s},
        lambda case: {"mask": tw.causal, "score": tw.bias(torch.zeros(case.seqlen_q, case.seqlen_k))},
        lambda case: {"score": tw.bias(torch.zeros(65, 65).masked_fill(~_keep(case, lambda i, j: j <= i), -torch.inf))},
    ],
    "causal_more_keys": [lambda case: {"mask": tw.explicit(_keep(case, lambda i, j: j <= i))}],
    "window": [
        lambda case: {"mask": tw.explicit(_keep(case, lambda i, j: (j <= i) & (j > i - 9)))},
        lambda case: {"mask": tw.causal & tw.mask(lambda b, h, i, j: i - j < 9)},
        lambda case: {"mask": ~(~tw.causal | ~tw.window(9, None))},
    ],
    "anti_causal": [lambda case: {"mask": lambda b, h, i, j: j > i}],
    "neighborhood_1d": [
        lambda case: {"mask": lambda b, h, i, j: (j - i.clamp(3, 36) <= 3) & (i.clamp(3, 36) - j <= 3)},
    ],
    "softcap_causal": [
        lambda case: {"score": lambda s, b, h, i, j: 1.5 * torch.tanh(s / 1.5)},
        lambda case: {"score": (lambda s, b, h, i, j: s / 1.5) >> tw.tanh_score() >> (lambda s, b, h, i, j: s * 1.5)},
    ],
}


@pytest.mark.parametrize(
    ("name", "spelling"), [pytest.param(n, f, id=f"{n}-{k}") for n, fs in SPELLINGS.items() for k, f in enumerate(fs)]
)
def test_formulas_of_one_meaning_agree(name: str, spelling: Callable[[Case], dict[str, Any]]) -> None:
    for impl in ("cpu_tiled", "reference"):
        properties.formulas_of_one_meaning_agree(Setting(impl), CASES[name], **spelling(CASES[name]))


def test_the_choice_of_implementation_is_the_first_that_can() -> None:
    for case, first in (
        ("plain", "cpu_sdpa"),
        ("causal", "cpu_sdpa"),
        ("window", "cpu_tiled"),
        ("packed", "cpu_tiled"),
    ):
        explanation = properties.explain(CASES[case])
        assert explanation.chosen == first, str(explanation)
    assert not can_run(Setting("cpu_sdpa"), CASES["window"])
    assert {k for k, _ in LENGTHS} >= {0, 1}, "empty and length-1 sequences stay among the packed cases"


@pytest.mark.parametrize("impl", ["cpu_tiled", "reference"])
def test_empty_inputs(impl: str) -> None:
    """No query, no key or no batch: nothing to compute, shapes as ever; without keys every row is empty."""
    for batch, seqlen_q, seqlen_k in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        q = torch.randn(batch, seqlen_q, 2, 8, requires_grad=True)
        k, v = (torch.randn(batch, seqlen_k, 2, 8, requires_grad=True) for _ in range(2))
        sink = torch.randn(2, requires_grad=True)
        o, lse = tw.attention_with_lse(q, k, v, mask=tw.causal, impl=impl)
        assert (o.shape, lse.shape) == ((batch, seqlen_q, 2, 8), (batch, 2, seqlen_q))
        assert not o.any()
        assert bool((lse == -torch.inf).all())
        grads = torch.autograd.grad(o.sum(), (q, k, v))
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
        assert not any(bool(g.any()) for g in grads)
        o, lse = tw.attention_with_lse(q, k, v, sink=sink, impl=impl)
        if seqlen_k == 0:
            assert torch.equal(lse, sink.detach()[None, :, None].expand_as(lse))
            (dsink,) = torch.autograd.grad(lse.sum(), sink)
            assert torch.equal(dsink, torch.full_like(sink, batch * seqlen_q))


@pytest.mark.parametrize("name", ["window", "document_window", "relative_bias", "dropout_causal", "bias_batch"])
def test_a_default_device_changes_nothing(name: str) -> None:
    """Tensors say where a call runs; a context that puts new tensors elsewhere is the caller's own."""
    for impl in ("cpu_tiled", "reference"):
        inputs, other = (make_inputs(CASES[name].with_(batch=1), torch.float32) for _ in range(2))
        plain = properties.run(Setting(impl), inputs)
        with torch.device("meta"):
            elsewhere = properties.run(Setting(impl), other)
        properties.same_bits(plain, elsewhere, "another default device")


@pytest.mark.parametrize("impl", ["cpu_tiled", "cpu_sdpa"])
def test_an_input_changed_in_place_before_backward_is_an_error(impl: str) -> None:
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    k = torch.randn(1, 16, 2, 8)
    o = tw.attention(q, k, k, impl=impl)
    k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


CHANGED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {}


def changed(make: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A call of attention and one of the tensors that its backward reads."""
    CHANGED[make.__name__] = make


@changed
def mask_tensor(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(16) // 5
    return tw.attention(q, q, q, mask=tw.document(ids)), ids


@changed
def score_tensor(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    slopes = torch.ones(2)
    return tw.attention(q, q, q, score=tw.alibi(slopes)), slopes


@changed
def cumulative_lengths(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cu_seqlens = torch.tensor([0, 5, 16], dtype=torch.int32)
    return tw.attention(q[0], q[0], q[0], layout=tw.Packed(cu_seqlens)), cu_seqlens


@changed
def seed_tensor(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seed = torch.tensor([5])
    return tw.attention(q, q, q, dropout=0.5, seed=seed), seed


@pytest.mark.parametrize("name", CHANGED)
def test_what_the_backward_reads_may_not_change_before(name: str) -> None:
    o, tensor = CHANGED[name](torch.randn(1, 16, 2, 8, requires_grad=True))
    tensor.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("impl", ["cpu_tiled", "cpu_sdpa", "reference"])
def test_autograd_alone_keeps_the_inputs(impl: str) -> None:
    """Checkpointing frees activations, and saved-tensor hooks see each one."""
    alive, packed = [], []

    def block(x: torch.Tensor) -> torch.Tensor:
        q = x * 1.5
        alive.append(weakref.ref(q))
        return tw.attention(q, q, q, mask=tw.causal, impl=impl)

    x = torch.randn(1, 32, 2, 8, requires_grad=True)
    y = checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    y.sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        tw.attention(x, x, x, mask=tw.causal, impl=impl).sum().backward()
    assert packed.count(x.shape) == 4  # q, k, v and o


def test_seed_is_drawn_from_pytorchs_generator() -> None:
    x = torch.randn(1, 30, 2, 8)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(tw.attention(x, x, x, dropout=0.5))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    tensor_seed = torch.tensor([77])
    assert torch.equal(
        tw.attention(x, x, x, dropout=0.5, seed=77), tw.attention(x, x, x, dropout=0.5, seed=tensor_seed)
    )


def test_memory_is_linear_in_the_sequence() -> None:
    """The largest tensor of the tiled path grows with the tile, not with seqlen_q * seqlen_k."""
    import torch.utils._python_dispatch as dispatch

    class Largest(dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor) and x.numel():
                    self.size = max(self.size, x.untyped_storage().nbytes())
            return out

    sizes = []
    for seqlen in (1024, 2048):
        q = torch.randn(1, seqlen, 1, 16, requires_grad=True)
        with Largest() as largest:
            tw.attention(q, q, q, mask=tw.window(50), impl="cpu_tiled").sum().backward()
        sizes.append(largest.size)
    assert sizes[1] <= 2 * sizes[0]
    assert sizes[1] < 2048 * 2048 * 4 / 8


@pytest.mark.parametrize(("setting", "case"), runnable(["cpu_tiled"], [CASES["alibi_causal"]], DTYPES), ids=name_of)
def test_no_gradient_is_computed_that_nobody_wants(setting: Setting, case: Case) -> None:
    inputs = properties.make_inputs(case, setting.dtype)
    with torch.no_grad():
        o = tw.attention(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    assert not o.requires_grad
    inputs.k.requires_grad_(False)
    o = tw.attention(inputs.q, inputs.k, inputs.v, **inputs.arguments())
    o.backward(inputs.do)
    assert inputs.k.grad is None
    assert inputs.q.grad is not None


def test_inference_mode() -> None:
    """Tensors made there count no versions; lengths and ids are read all the same, and anew after a change."""
    x = torch.randn(20, 2, 8)
    with torch.inference_mode():
        cu = torch.tensor([0, 5, 20], dtype=torch.int32)
        ids, table = torch.tensor([0, 1] * 10), torch.tensor([1, 2])
        packed = tw.attention(x, x, x, layout=tw.Packed(cu), mask=tw.causal)
        by_value = tw.attention(x[None], x[None], x[None], mask=lambda b, h, i, j: table[ids[j]] > 0)
        ids += 5
        with pytest.raises(FormulaError, match="reaches 5 to 6"):
            tw.attention(x[None], x[None], x[None], mask=lambda b, h, i, j: table[ids[j]] > 0)
    other = torch.tensor([0, 5, 20], dtype=torch.int32)
    assert torch.equal(packed, tw.attention(x, x, x, layout=tw.Packed(other), mask=tw.causal))
    torch.testing.assert_close(by_value[0], tw.attention(x[None], x[None], x[None])[0])


@pytest.mark.parametrize("seqlen", [1, 4, 7, 8, 15, 16, 17, 33])
def test_nan_reaches_the_whole_row_at_any_length(seqlen: int) -> None:
    q, k, v = (torch.randn(1, seqlen, 1, 8) for _ in range(3))
    q[0, 0] = torch.nan
    o, lse = tw.attention_with_lse(q, k, v)
    assert bool(o[0, 0].isnan().all())
    assert bool(lse[0, 0, 0].isnan())
    assert bool(o[0, 1:].isfinite().all())
