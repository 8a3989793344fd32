"""Additive formulas by PyTorch's fused kernel: the whole property matrix, and each case that the kernel cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.ops.attention import cpu, cpu_bias, cpu_fused
from tilewise.ops.attention.problem import Call, make_call
from tilewise.testing import properties
from tilewise.testing.case import Case
from tilewise.testing.cases import CPU_CASES
from tilewise.testing.far_scores import SIZES, low_rows_are_means, no_sink_adds_nothing
from tilewise.testing.matrix import name_of, runnable
from tilewise.testing.properties import Setting

MATRIX = runnable(("cpu_tiled",), CPU_CASES, (torch.float32,))
SLOPES = torch.tensor([0.5, 0.1])
IDS = torch.arange(300) // 70


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Short calls go to the kernel, too; names of its functions, as they are called."""
    ran: list[str] = []
    monkeypatch.setattr(cpu_fused, "FEWEST", 1)
    monkeypatch.setattr(cpu_fused, "WORTH", 1e9)
    for name in ("forward", "backward"):
        plain = getattr(cpu_fused, name)
        monkeypatch.setattr(cpu_fused, name, lambda *a, name=name, plain=plain: (ran.append(name), plain(*a))[1])
    return ran


@pytest.mark.parametrize(("setting", "case"), MATRIX, ids=name_of)
def test_equals_the_reference(setting: Setting, case: Case, fused: list[str]) -> None:
    properties.equals_reference(setting, case)
    properties.gradients_equal_reference(setting, case)


@pytest.mark.parametrize("size", SIZES)
def test_low_rows_are_means(size: float, fused: list[str]) -> None:
    low_rows_are_means(Setting("cpu_tiled"), size, kept=True)


def test_no_sink_adds_nothing(fused: list[str]) -> None:
    no_sink_adds_nothing(Setting("cpu_tiled"))


FORMULAS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"mask": tw.causal},
    "alibi": {"score": tw.alibi(SLOPES)},
    "causal_alibi": {"score": tw.alibi(SLOPES), "mask": tw.causal},
    "window": {"mask": tw.window(40)},
    "no_keys_for_some": {"mask": tw.window(40) & tw.mask(lambda b, h, i, j: i % 5 != 0)},
    "documents": {"mask": tw.document(IDS) & tw.causal, "score": tw.score(lambda s, b, h, i, j: s + IDS[j] * 0.25)},
    "by_batch": {"mask": tw.lengths(torch.tensor([300, 0, 77]))},
    "by_head": {"mask": tw.mask(lambda b, h, i, j: (j + h) % 2 == 0)},
}


def _tensors(
    rows_q: int = 300, rows_k: int = 300, heads: int = 2, heads_kv: int = 2, dim: int = 16, batch: int = 3
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows_q)
    shapes = ((rows_q, heads), (rows_k, heads_kv), (rows_k, heads_kv))
    return [torch.randn(batch, *shape, dim, generator=generator).requires_grad_() for shape in shapes]


def _results(tensors: list[torch.Tensor], impl: str = "cpu_tiled", **options: Any) -> list[torch.Tensor]:
    o, lse = tw.attention_with_lse(*tensors, impl=impl, **options)
    wanted = [*tensors, *([options["sink"]] if "sink" in options else [])]
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, wanted, torch.cos(o.detach() * 7.0 + 1.0))]


def _same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("rows_q", "rows_k", "heads_kv"), [(300, 300, 2), (300, 300, 1), (17, 300, 2)], ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_formulas(name: str, rows_q: int, rows_k: int, heads_kv: int, sink: bool, fused: list[str]) -> None:
    """Rows without keys, groups of heads, fewer queries than keys, sinks; several blocks where they are worth it."""
    tensors = _tensors(rows_q, rows_k, heads_kv=heads_kv)
    options = {**FORMULAS[name], **({"sink": torch.tensor([0.3, -1.0], requires_grad=True)} if sink else {})}
    found = _results(tensors, **options)
    assert fused == ["forward", "backward"]
    _same(found, _results(tensors, "reference", **options))


def test_several_blocks_and_a_short_last_run(fused: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_fused, "BLOCK_M", 32)
    monkeypatch.setattr(cpu_fused, "BLOCK_N", 16)
    monkeypatch.setattr(cpu_bias, "BIAS", 1)  # heads one at a time
    cpu_fused._blocks_without_tensors.cache_clear()
    last = tw.mask(lambda b, h, i, j: (j > 256) | (i < 40) & (j < 20) & (h == 0))
    for mask in (last, last & tw.document(torch.arange(260) // 7), tw.causal & tw.window(20)):
        tensors = _tensors(260, 260, heads=4)
        call = make_call(*tensors, mask=mask)
        blocks = cpu_fused.blocks_of(call)
        assert blocks is not None
        assert all(block.keys.stop - block.keys.start in (0, *range(16, 261)) for block in blocks)
        _same(_results(tensors, mask=mask), _results(tensors, "reference", mask=mask))
    assert len(blocks) > 1
    cpu_fused._blocks_without_tensors.cache_clear()


def test_packed_sequences(fused: list[str]) -> None:
    lengths = torch.tensor([0, 40, 41, 41, 141], dtype=torch.int32)
    tensors = [torch.randn(141, n, 8).requires_grad_() for n in (4, 2, 2)]
    options = {"layout": tw.Packed(lengths), "mask": tw.causal, "score": tw.alibi(torch.rand(4))}
    found = _results(tensors, **options)
    assert fused.count("forward") == 2  # the sequence of one token has too few keys
    _same(found, _results(tensors, "reference", **options))


STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "rows_expanded": lambda x: x[:, :1].expand(x.shape),
    "batch_expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("formula", ["causal_alibi", "documents"])
def test_strides(name: str, formula: str, fused: list[str]) -> None:
    tensors = [STRIDES[name](x.detach()).requires_grad_() for x in _tensors()]
    found = _results(tensors, **FORMULAS[formula])
    assert fused == ["forward", "backward"]
    _same(found, _results(tensors, "reference", **FORMULAS[formula]))


UNSERVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softcap": ({}, {"score": tw.softcap(30.0)}),
    "scaled_score": ({}, {"score": tw.score(lambda s, b, h, i, j: 2.0 * s)}),
    "subtracted_score": ({}, {"score": tw.score(lambda s, b, h, i, j: (i - j) * 0.1 - s)}),
    "score_twice": ({}, {"score": tw.score(lambda s, b, h, i, j: s + torch.floor(s))}),
    "dropout": ({}, {"mask": tw.causal, "dropout": 0.5, "seed": 3}),
    "batch_invariant": ({}, {"mask": tw.causal, "batch_invariant": True}),
    "few_keys": ({"rows_k": 15}, {"mask": tw.causal}),
    "empty_batch": ({"batch": 0}, {"mask": tw.causal}),
    "no_queries": ({"rows_q": 0}, {"mask": tw.causal}),
    "no_keys": ({"rows_k": 0}, {"mask": tw.causal}),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_the_kernel_does_not_serve(name: str, fused: list[str]) -> None:
    sizes, options = UNSERVED[name]
    tensors = _tensors(**sizes)
    found = _results(tensors, **options)
    assert not fused
    if "dropout" not in options:
        _same(found, _results(tensors, "reference", **options))


def test_other_dtypes_and_wider_values_are_tiled(fused: list[str]) -> None:
    q, k, v = (x.detach() for x in _tensors())
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        tw.attention(*(x.to(dtype) for x in (q, k, v)), mask=tw.window(9))
    tw.attention(q, k, torch.cat([v, v], -1), mask=tw.window(9))
    assert not fused


def test_gradients_of_captured_tensors_and_of_lse_are_tiled(fused: list[str]) -> None:
    tensors, slopes = _tensors(), torch.rand(2, requires_grad=True)
    for impl in ("cpu_tiled", "reference"):
        o, lse = tw.attention_with_lse(*tensors, score=tw.alibi(slopes), impl=impl)
        grads = torch.autograd.grad(o.sum() + lse.square().sum(), [*tensors, slopes])
        if impl == "cpu_tiled":
            found = grads
    assert fused == ["forward"]
    _same(list(found), list(grads))


def test_scattered_tiles_are_tiled() -> None:
    """One run of keys would hold much that the mask hides."""
    ends = tw.mask(lambda b, h, i, j: (j < 64) | (j >= 4000))
    q = torch.randn(1, 4096, 1, 8)
    assert cpu_fused.serves(make_call(q, q, q, mask=ends))
    assert cpu_fused.blocks_of(make_call(q, q, q, mask=ends)) is None
    assert cpu_fused.blocks_of(make_call(q, q, q, mask=tw.causal & tw.window(256))) is not None


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["q", "k", "v"])
def test_what_is_no_number_changes_no_bit_of_other_batch_elements(where: int, value: float, fused: list[str]) -> None:
    clean = _tensors()
    edited = [x.detach().clone() for x in clean]
    edited[where][1, 140, 0, 3] = value
    formula = FORMULAS["causal_alibi"]
    found, wanted = _results([x.requires_grad_() for x in edited], **formula), _results(clean, **formula)
    reference = _results(edited, "reference", **formula)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[[0, 2]], other[[0, 2]])
    assert not found[3 if where == 0 else 2][1, 140, 0].isfinite().all(), "dk of a key that the query sees, or its dq"
    torch.testing.assert_close(found[0], reference[0].float(), equal_nan=True, rtol=2e-5, atol=2e-5)


def test_scores_of_minus_infinity_count_as_unseen(fused: list[str]) -> None:
    """PyTorch's lse is 0 there, as it may be of a row that sees something."""
    q, v = torch.rand(1, 32, 2, 8) + 0.1, torch.randn(1, 32, 2, 8)
    v[:, 0] = 0.0
    for key in (0.0, -torch.inf):
        k = torch.full((1, 32, 2, 8), key)
        found = tw.attention_with_lse(q, k, v, mask=tw.window(3), impl="cpu_tiled")
        wanted = tw.attention_with_lse(q, k, v, mask=tw.window(3), impl="reference")
        torch.testing.assert_close(found, wanted)


def test_far_log_sums_are_tiled_in_the_backward(fused: list[str]) -> None:
    tensors = _tensors()
    options = {"score": tw.score(lambda s, b, h, i, j: s + 3000.0), "mask": tw.causal}
    found = _results(tensors, **options)
    assert fused == ["forward"]
    for one, other in zip(found, _results(tensors, "reference", **options), strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_negligible_weights_change_no_gradient(seed: int, fused: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    tensors = [(x.detach() * 3.0).requires_grad_() for x in _tensors()]
    options = {"score": tw.alibi(torch.tensor([20.0, 0.01]))}
    found = _results(tensors, **options)
    monkeypatch.setattr(cpu_fused, "NEGLIGIBLE", torch.inf)
    for one, other in zip(found, _results(tensors, **options), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-20)


@pytest.mark.parametrize("name", ["causal_alibi", "documents"])
def test_results_repeat(name: str, fused: list[str]) -> None:
    first, second = (_results(_tensors(), **FORMULAS[name]) for _ in range(2))
    assert all(map(torch.equal, first, second))


def _off_by_one(patch: pytest.MonkeyPatch) -> None:
    of = cpu_bias.Bias.of
    patch.setattr(cpu_bias.Bias, "of", lambda self, *a: of(self, *a).roll(1, -1))  # type: ignore[union-attr]


def _order_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cpu_bias.Bias, "ordered", lambda self, x, rows: x)


def _all_by_distance(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cpu_bias, "_of_distance", lambda root: True)


@pytest.mark.parametrize(
    ("broken", "name"),
    [(_off_by_one, "window"), (_order_forgotten, "causal_alibi"), (_all_by_distance, "documents")],
)
def test_a_broken_twin_is_caught(
    broken: Callable[[pytest.MonkeyPatch], None], name: str, fused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = _tensors()
    wanted = _results(tensors, "reference", **FORMULAS[name])
    broken(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        _same(_results(tensors, **FORMULAS[name]), wanted)


def test_values_of_tensors_are_not_kept() -> None:
    """A mask's blocks are remembered only where it has no tensors."""
    ids = torch.zeros(512, dtype=torch.int64)
    q = torch.randn(1, 512, 2, 16)
    tw.attention(q, q, q, mask=tw.document(ids), impl="cpu_tiled")
    ids.copy_(torch.arange(512) // 100)
    options: dict[str, Any] = {"mask": tw.document(ids)}
    found, wanted = (tw.attention(q, q, q, impl=impl, **options) for impl in ("cpu_tiled", "reference"))
    torch.testing.assert_close(found, wanted)


def test_which_formulas_depend_on_the_distance_alone() -> None:
    def of_distance(call: Call) -> bool:
        return cpu_bias.Bias(call).line is not None

    q = torch.randn(1, 64, 2, 16)
    yes = (
        tw.causal,
        tw.window(9),
        tw.mask(lambda b, h, i, j: (i + 3 - j) % 4 == h),
        tw.mask(lambda b, h, i, j: i > j - 2),
    )
    no = (
        tw.mask(lambda b, h, i, j: i + j > 9),
        tw.mask(lambda b, h, i, j: 2 * i > 2 * j),
        tw.lengths(torch.tensor([9])),
    )
    for mask in yes:
        assert of_distance(make_call(q, q[:, :50], q[:, :50], mask=mask)), mask
    for mask in no:
        assert not of_distance(make_call(q, q, q, mask=mask)), mask
    assert cpu.cpu_fused is cpu_fused
