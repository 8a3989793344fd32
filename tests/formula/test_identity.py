"""Equality, hash, repr and the algebra of masks and scores."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import FormulaError

IDS = torch.arange(12) // 5
I, J = torch.arange(12)[:, None], torch.arange(12)


def table(mask: tw.Mask) -> torch.Tensor:
    zero = torch.tensor(0)
    return mask.evaluate(b=zero, h=zero, i=I, j=J).expand(12, 12)


def test_equal_by_structure_numbers_and_tensors() -> None:
    assert tw.window(5) == tw.window(5)
    assert hash(tw.window(5)) == hash(tw.window(5))
    assert tw.window(5) != tw.window(6)
    assert tw.causal & tw.document(IDS) == tw.causal & tw.document(IDS)
    assert tw.document(IDS) != tw.document(IDS.clone())
    assert tw.mask(lambda b, h, i, j: i >= j) == tw.causal
    assert tw.causal != tw.score(lambda s, b, h, i, j: s)
    assert tw.causal != "causal"
    assert len({tw.window(5), tw.window(5), tw.window(6), tw.causal}) == 3


def test_numbers_and_tensors_do_not_change_the_text() -> None:
    assert tw.window(5).text == tw.window(6000).text
    assert tw.softcap(30.0).text == tw.softcap(50.0).text
    assert tw.document(IDS).text == tw.document(torch.zeros(99, dtype=torch.int32)).text
    assert tw.alibi(torch.ones(2)).text == tw.alibi(torch.ones(8)).text
    assert tw.chunked(3).text == tw.chunked(4).text
    assert tw.causal.text != (~tw.causal).text
    assert tw.document(IDS).text != tw.document(IDS[None]).text


@pytest.mark.parametrize("formula", [tw.causal & tw.window(5), tw.softcap(3.0) >> tw.tanh_score(),
                                     tw.mask(lambda b, h, i, j: i - j < 3), tw.chunked(4)], ids=repr)  # fmt: skip
def test_formulas_can_be_pickled_and_copied(formula: Any) -> None:
    for again in (pickle.loads(pickle.dumps(formula)), copy.deepcopy(formula)):
        assert again == formula
        assert (type(again), repr(again)) == (type(formula), repr(formula))


def test_a_pickled_mask_takes_its_tensors_along() -> None:
    ids = torch.arange(12) // 5
    again = pickle.loads(pickle.dumps(tw.document(ids)))
    assert torch.equal(again.tensors[0], ids)
    assert torch.equal(table(again), table(tw.document(ids)))


def test_one_tensor_read_twice_has_one_slot() -> None:
    assert len(tw.document(IDS).tensors) == 1
    assert len((tw.document(IDS) & tw.document(IDS.clone())).tensors) == 2
    assert tw.document(IDS).tensors[0] is IDS
    factor = torch.tensor(2.0)
    twice = [tw.score(lambda s, b, h, i, j: s * factor + factor) for _ in range(2)]
    assert twice[0].tensors == (factor,)
    assert twice[0] == twice[1]


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (tw.causal, "causal"),
        (tw.causal & tw.window(4), "causal & window(4)"),
        (tw.window(4, 3), "window(4, 3)"),
        (tw.causal | tw.prefix(torch.ones(2, dtype=torch.int64)), "causal | prefix(lengths)"),
        ((tw.causal | tw.window(4)) & tw.chunked(3), "(causal | window(4)) & chunked(3)"),
        (tw.causal | (tw.window(4) & tw.chunked(3)), "causal | (window(4) & chunked(3))"),
        (
            (tw.causal | tw.window(2)) & (tw.chunked(3) | tw.window(4)),
            "(causal | window(2)) & (chunked(3) | window(4))",
        ),
        (~(tw.causal & tw.window(2)), "~(causal & window(2))"),
        (~tw.causal, "~causal"),
        (
            (tw.causal & tw.window(2)) | ((tw.causal & tw.chunked(3)) & tw.window(9)),
            "(causal & window(2)) | (causal & chunked(3) & window(9))",
        ),
        (tw.alibi(torch.ones(2)) >> tw.softcap(30.0), "alibi(slopes) >> softcap(30.0)"),
        (tw.mask(lambda b, h, i, j: (i - j < 3) | (j == 0)), "(((i - j) < 3) | (j == 0))"),
        (tw.mask(lambda b, h, i, j: ~(IDS[i] == IDS[j])), "~((tensor[i] == tensor[j]))"),
    ],
    ids=str,
)
def test_repr_reads_like_the_source(formula: Any, text: str) -> None:
    assert repr(formula) == text


@pytest.mark.parametrize("mask", [tw.causal, tw.causal & tw.window(3), tw.document(IDS)], ids=repr)
def test_bool_of_a_mask_raises(mask: tw.Mask) -> None:
    with pytest.raises(FormulaError, match=r"& \| ~"):
        bool(mask)
    with pytest.raises(FormulaError):
        _ = mask and tw.window(4)
    with pytest.raises(FormulaError):
        _ = not mask


def test_bool_of_a_score_raises() -> None:
    with pytest.raises(FormulaError, match=">>"):
        _ = tw.softcap(2.0) or None


def test_masks_obey_boolean_algebra() -> None:
    a, b, c = tw.causal, tw.window(4, 2), tw.document(IDS)
    assert torch.equal(table(~(a & b)), table(~a | ~b))
    assert torch.equal(table(~(a | b)), table(~a & ~b))
    assert torch.equal(table(a & (b | c)), table((a & b) | (a & c)))
    assert torch.equal(table(a & b), table(b & a))
    assert ~~a == a
    assert not table(a & ~a).any()
    assert table(a | ~a).all()


def test_functions_join_masks_and_scores() -> None:
    assert torch.equal(table(tw.causal & (lambda b, h, i, j: j > 3)), table(tw.causal) & (J > 3))
    assert torch.equal(table((lambda b, h, i, j: j > 3) | tw.causal), table(tw.causal) | (J > 3))
    assert torch.equal(table((lambda b, h, i, j: j > 3) & tw.causal), table(tw.causal) & (J > 3))
    s = torch.randn(12, 12)
    zero = torch.tensor(0)
    composed = (lambda s, b, h, i, j: s * 2.0) >> tw.softcap(3.0)
    torch.testing.assert_close(composed.evaluate(s=s, b=zero, h=zero, i=I, j=J), 3.0 * torch.tanh(s * 2.0 / 3.0))


def test_scores_compose_in_reading_order() -> None:
    slopes, zero, s = torch.tensor([0.5]), torch.tensor(0), torch.randn(12, 12)
    alibi = s - 0.5 * (I - J).abs()
    at = {"b": zero, "h": zero, "i": I, "j": J}
    first = tw.alibi(slopes) >> tw.softcap(2.0)
    last = tw.softcap(2.0) >> tw.alibi(slopes)
    torch.testing.assert_close(first.evaluate(s=s, **at), 2.0 * torch.tanh(alibi / 2.0))
    torch.testing.assert_close(last.evaluate(s=s, **at), 2.0 * torch.tanh(s / 2.0) - 0.5 * (I - J).abs())


def test_window_counts_the_query_itself() -> None:
    assert table(tw.window(3)).sum(1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    assert table(tw.window(3, 2)).sum(1).tolist() == [3, 4, 5, 5, 5, 5, 5, 5, 5, 5, 4, 3]
    assert table(tw.window(None, None)).all()
    assert torch.equal(table(tw.window(None)), table(tw.causal))
