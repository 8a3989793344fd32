"""The Triton kernels of `sample`: equal to the specification over several parts of a row, the same random bits, and
broken twins are caught.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.interpret.test_twins import broken_copy
from tilewise.ops.sampling import triton_sampling, triton_thresholds
from tilewise.testing import sampling as cases
from tilewise.testing.sampling import SamplingCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers are infinite


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampling, "_PART", 64)
    monkeypatch.setattr(triton_sampling, "_CHUNK", 64)
    monkeypatch.setattr(triton_sampling, "_HISTORY", 16)


SMALL = [dataclasses.replace(case, rows=3, width=131) for case in cases.CASES]
KINDS = [*((case, torch.float32) for case in SMALL), *((case, torch.float16) for case in SMALL[::8])]


@pytest.mark.parametrize(("case", "dtype"), KINDS, ids=repr)
def test_equals_the_specification(case: SamplingCase, dtype: torch.dtype) -> None:
    cases.check(cases.make_arguments(case, dtype), "triton")


@pytest.mark.parametrize("temperature", [0, 1.3])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_rows_that_fail_are_told_apart(temperature: float, truncation) -> None:
    x = torch.zeros(5, 100)
    x[1, 73], x[2, 0], x[3] = torch.nan, torch.inf, -torch.inf
    arguments = {"temperature": temperature, "seeds": 0, "positions": 0, "logprobs": 2, **truncation}
    found, wanted = (tw.sample(x, **arguments, impl=impl) for impl in ("triton", "reference"))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("first", [0, 5])
def test_shards_choose_what_the_whole_vocabulary_does(first: int) -> None:
    arguments = cases.make_arguments(SamplingCase("mixed", "none", cases.PENALTIES[3], True, rows=9), torch.float32)
    whole = tw.sample(**arguments, impl="triton")
    shards = []
    for part in (slice(0, 70 + first), slice(70 + first, 203)):
        columns = {"logits": arguments["logits"][:, part], "first_token": part.start}
        shards.append(tw.sample(**(arguments | columns), impl="triton"))
    values, tokens = torch.stack([s.values for s in shards]), torch.stack([s.tokens for s in shards])
    assert torch.equal(tw.combine_shards(values, tokens), whole.tokens)
    assert torch.equal(values.amax(0), whole.values)


def test_equal_logits_come_by_index() -> None:
    x = torch.full((1, 160), 2.0)
    x[:, :70] = 1.0
    arguments = {"seeds": 1, "positions": 1, "logprobs": 100, "logprobs_of": "processed", "impl": "triton"}
    for truncation in ({"top_k": 75}, {"top_p": 74.5 / (90.0 + 70.0 / math.e)}):
        listed = tw.sample(x, **arguments, **truncation).top_tokens[0]
        assert listed.tolist() == [*range(70, 145), *[-1] * 25]
    assert tw.sample(x, temperature=0, impl="triton").tokens.tolist() == [70]


ALL = SamplingCase("mixed", "top_k top_p min_p", "repetition presence frequency", True, "masks", "processed 20", rows=3)
PLAIN = SamplingCase("mixed", "none", "repetition presence frequency", False, "rows", "raw 3", 6, rows=3)
PENALISED = SamplingCase("mixed", "none", "repetition presence frequency", lists="processed 20", rows=3)
BIAS = SamplingCase(bias=True, first_token=6)
P = SamplingCase("mixed", "top_p", lists="processed 20")
TWINS = [
    (triton_sampling, "process_parts", "tl.where(count != 0,", "tl.where(output > 0.0,", PENALISED),
    (triton_sampling, "process_parts", "(output > 0.0).to(tl.float32)", "output", PENALISED),
    (triton_sampling, "process_parts", " | (mask < 0)", "", ALL),
    (triton_sampling, "process_parts", "words.to(tl.float32) *", "(words ^ 65536).to(tl.float32) *", PLAIN),
    (triton_sampling, "process_parts", "(first_token + tl.min(column, 0)) // 4", "tl.min(column, 0) // 4", PLAIN),
    (triton_sampling, "process_parts", "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
     "tl.join(tl.join(w0, w1), tl.join(w2, w3))", PLAIN),
    (triton_sampling, "count_tokens", "mask=there & output,", "mask=there,", PENALISED),
    (triton_sampling, "add_bias", "column = token - first_token", "column = token", BIAS),
    (triton_sampling, "join_lists", "both < before", "both <= before", PLAIN),
    (triton_sampling, "draw_parts", "if LEAST is not None:", "if False:", ALL),
    (triton_thresholds, "find_thresholds", "missing -= tl.sum", "missing -= 0 * tl.sum", ALL),
    (triton_thresholds, "find_thresholds", "p * (total + tied)", "p * 0.5 * total", P),
    (triton_thresholds, "find_thresholds", "last | (step * 3)", "last | (step * 2)", P),
]  # fmt: skip


@pytest.mark.parametrize(("module", "kernel", "old", "new", "case"), TWINS)
def test_a_broken_twin_is_caught(module, kernel, old, new, case, tmp_path: Path, monkeypatch) -> None:
    copy = broken_copy(module, old, new, tmp_path)
    monkeypatch.setattr(triton_sampling, kernel, getattr(copy, kernel))
    with pytest.raises(AssertionError):
        check_some(case)


def test_one_tie_more_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = broken_copy(triton_thresholds, "+ before == ties", "+ before == ties + 1", tmp_path)
    monkeypatch.setattr(triton_sampling, "find_thresholds", copy.find_thresholds)
    with pytest.raises(AssertionError):
        test_equal_logits_come_by_index()


def check_some(case: SamplingCase) -> None:
    """Of several draws, one shows a wrong kernel."""
    for seed in range(3):
        cases.check(cases.make_arguments(case, torch.float32, seed=seed), "triton")


@pytest.mark.parametrize("offset", [1e4, 1e9, -1e30])
def test_what_all_logits_have_added_changes_nothing(offset: float) -> None:
    cases.check_far_logits(offset, "triton")
