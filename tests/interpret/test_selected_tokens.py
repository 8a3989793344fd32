"""The Triton kernels of what chooses tokens for SparQ, and attention over them; broken twins are caught."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.interpret.test_twins import fails_when_broken
from tilewise.ops import triton_launch
from tilewise.ops.query_parts import triton_query_parts
from tilewise.ops.token_choice import problem, triton_token_choice
from tilewise.ops.token_choice.problem import Call
from tilewise.ops.token_choice.table import CHOOSE_TOKENS
from tilewise.ops.token_rest import triton_token_rest
from tilewise.ops.token_scores import triton_token_scores
from tilewise.ops.token_scores.problem import sample_of
from tilewise.testing import page_selection, query_parts, token_choice, token_rest, token_scores
from tilewise.testing.page_selection import BY_NAME, SPARQ, PagesCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where numbers are NaN


@pytest.mark.parametrize("case", SPARQ, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scores_of_tokens(case: PagesCase, dtype: torch.dtype) -> None:
    token_scores.check(token_scores.make_call(case, dtype), "triton")


@pytest.mark.parametrize("case", SPARQ, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parts_of_queries(case: PagesCase, dtype: torch.dtype) -> None:
    query_parts.check(query_parts.make_call(case, dtype), "triton")


SIZES = {  # tokens of a tile, keys of a sample, keys that are searched
    "one_tile": (8192, 8192, 8192), "tiles": (16, 16, 8), "all_searched": (16, 16, 64), "large_sample": (16, 32, 16),
    "small_sample": (64, 2, 4),
}  # fmt: skip


def use_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tile, sample, between = SIZES[name]
    for constant, size in (("_TILE", tile), ("_VALUES", tile)):
        monkeypatch.setattr(problem, constant, size)
    for constant, bounds in (("_SAMPLE", sample), ("_BETWEEN", (between, between)), ("_BLOCK", 2 * tile)):
        monkeypatch.setattr(triton_token_choice, constant, bounds)


@pytest.mark.parametrize("case", SPARQ, ids=repr)
@pytest.mark.parametrize("sizes", SIZES)
def test_choices_of_tokens(case: PagesCase, sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_sizes(sizes, monkeypatch)
    token_choice.check(token_choice.make_call(case, torch.float32), "triton")


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", ["equal", "two_values", "ascending", "few_among_equal"])
def test_choices_that_a_sample_misleads(kind: str, sizes: str, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that it says little of, or, where it is not `told` of them, nothing."""
    use_sizes(sizes, monkeypatch)
    call = token_choice.make_call(BY_NAME["sparq"], torch.float32)
    n = torch.arange(call.total.shape[-1])
    total = {
        "equal": torch.ones(len(n)),
        "two_values": (n % 3 == 1).float(),
        "ascending": n - 5.0,
        "few_among_equal": torch.where(n % 7 == 0, 1e-38 * n, -1.0),
    }[kind]
    call.total.copy_(total)
    call.sample.copy_(sample_of(call.total) if told else call.sample.flip(-1))
    token_choice.check(call, "triton")


@pytest.mark.parametrize("length", [16_384, 9_000])
@pytest.mark.parametrize("width", [5, 600, 2500, 8_990])
@pytest.mark.parametrize("scores", ["normal", "far_from_zero", "small_steps", "few_large", "clusters"])
def test_a_sample_does(width: int, length: int, scores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ordinary scores it says where the least lies that is read: no program goes through all tokens."""

    def never(*arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr(triton_token_choice, "least_of_all", never)
    x = torch.randn(1, 1, 1, 16_384, generator=torch.Generator().manual_seed(width))
    x = {
        "normal": x,
        "far_from_zero": 300.0 + x,
        "small_steps": (x * 1000).round(),
        "few_large": torch.where(x > 2.0, 1e30 * x, x),
        "clusters": (x * 4).round() + x * 1e-4,
    }[scores]
    runs, numbers = x.view(1, 1, 1, 2048, 8).logsumexp(-1), torch.arange(2048, dtype=torch.int32)[None]
    lengths = torch.tensor([length], dtype=torch.int32)
    total = x[:, :, 0]
    call = Call(x, total, runs, sample_of(total), numbers, None, lengths, None, 8, width, 0, 8, 1, 1)
    tables, tokens, *_ = CHOOSE_TOKENS(call, "triton")
    read = torch.argsort(x[0, 0, 0, :length], descending=True, stable=True)[:width].sort().values
    assert tokens.item() == width
    assert torch.equal(tables[0, 0], read.int())


def use_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs have few numbers at once."""
    for constant, size in (("_LOGS", 8), ("_NUMBERS", 128), ("_VALUES", 32)):
        monkeypatch.setattr(triton_token_rest, constant, size)


@pytest.mark.parametrize("case", SPARQ, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("few", [False, True], ids=["at_once", "some_at_a_time"])
def test_what_stands_for_the_rest(
    case: PagesCase, dtype: torch.dtype, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few:
        use_few(monkeypatch)
    token_rest.check(token_rest.make_call(case, dtype), "triton")


@pytest.mark.parametrize("name", ["sparq", "sparq_multi_query"])
def test_attention_over_them(name: str) -> None:
    page_selection.check(BY_NAME[name], torch.float32, "triton_paged")


def test_calls_of_other_kinds_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "remember", True)
    for _ in range(2):
        for case in SPARQ[:3]:
            token_scores.check(token_scores.make_call(case, torch.float32), "triton")
            token_choice.check(token_choice.make_call(case, torch.float32), "triton")
            token_rest.check(token_rest.make_call(case, torch.float32), "triton")


TWINS = [
    (triton_token_scores, "score_tokens", "+ 4 * (t // of_word)", "", "sparq_drafts"),
    (triton_token_scores, "score_tokens", "columns + dim * each", "columns", "sparq"),
    (triton_token_scores, "score_tokens", "half * (each * OF_WORD) + byte", "byte", "sparq_drafts"),
    (triton_token_scores, "score_tokens", "more += s", "more = s", "sparq"),
    (triton_token_scores, "score_tokens", "n * (8 // BITS) + half", "n * (8 // BITS)", "sparq_drafts"),
    (triton_token_scores, "score_tokens", "of_row * GROUP + first + g", "of_row * GROUP + first", "sparq"),
    (triton_token_scores, "score_tokens", "log_sum(s, 1)", "tl.max(s, 1)", "sparq"),
    (triton_token_scores, "score_tokens", "- weight[:, None]", "", "sparq"),
    (triton_token_scores, "score_tokens", "x * low, 1", "x * step, 1", "sparq_long_pages"),
    (triton_token_scores, "score_tokens", "x * step, 1", "x * low, 1", "sparq_long_pages"),
    (triton_token_scores, "score_tokens", "(base[g] + x * low,)", "(x * low,)", "sparq"),
    (triton_token_scores, "score_tokens", "tl.join(a, c), tl.join(b, d)", "tl.join(a, b), tl.join(c, d)", "sparq"),
    (triton_token_scores, "score_tokens", "(run * STEP)", "run", "sparq"),
    (triton_query_parts, "part_queries", "total = tl.sum(size, 0)", "total = tl.max(size, 0)", "sparq"),
    (triton_query_parts, "part_queries", "tl.sum(tl.where(kept[None, :], size, 0.0), 1)", "tl.sum(size, 1)", "sparq"),
    (triton_query_parts, "part_queries", "(h * GROUP + g)", "(g)", "sparq"),
    # of these those that read too few, or others: with too many, numbers of tokens would be read that nobody wrote
    (triton_token_choice, "find_least", "digit < 256)", "digit >= 0)", "sparq"),
    (triton_token_choice, "find_least", "width - above, 0))", "width, 0))", "sparq"),
    (triton_token_choice, "find_least", "least = tl.where(at_b >= missing", "least = tl.where(at_b > 0", "sparq"),
    (triton_token_choice, "collect_keys", "first + found[2]", "first", "sparq"),
    (triton_token_choice, "take_tokens", "(places > ties)", "(places <= same - ties)", "sparq"),
    (triton_token_choice, "find_least", "(n < length - local)", "(n < length)", "sparq"),
    (triton_token_choice, "take_tokens", "tl.where(kept > 0, weights, ", "tl.where(kept >= 0, weights, ", "sparq"),
    (triton_token_choice, "take_tokens", "(m % PAGE)", "m", "sparq"),
    (triton_token_choice, "take_tokens", "[None, None, :] * by_token", "[None, None, :]", "sparq"),
    (triton_token_choice, "take_tokens", "x.numel > length - local", "x.numel > length", "sparq"),
    (triton_token_choice, "collect_keys", "x.numel > length - local", "x.numel > length", "sparq"),
    (triton_token_choice, "take_tokens", "(ties == 0) & (same > 0)", "same < 0", "sparq"),
    (triton_token_choice, "guess_and_add", "tl.minimum(counted - p * PAGE, PAGE)", "PAGE + 0 * p", "sparq"),
    (triton_token_choice, "guess_and_add", "run = part * (", "run = 0 * part * (", "sparq"),
    (triton_token_choice, "take_tokens", "(n >= read) & (n < width)", "(n > read) & (n < width)", "sparq_all"),
    (triton_token_choice, "guess_and_add", "log_sum(of_runs, 1)", "tl.max(of_runs, 1)", "sparq_drafts"),
    (triton_token_rest, "add_rest", "total += tl.load(of_parts", "total = tl.load(of_parts", "sparq"),
    (triton_token_rest, "add_rest", "tl.maximum(length, 1)", "tl.maximum(width, 1)", "sparq"),
    (triton_token_rest, "add_rest", "& (length > width)", "", "sparq_all"),
    (triton_token_rest, "add_rest", "(more > 0.0) &", "(length > 0) &", "sparq"),
    (triton_token_rest, "add_rest", "log_sum(tl.join(total, more), 1)", "more", "sparq"),
    (triton_token_rest, "add_rest", "start + n < count", "start < count", "sparq"),
    (triton_token_rest, "add_rest", "% OF_HEAD * QUERIES", "% OF_HEAD", "sparq_multi_query"),
    (triton_token_rest, "add_rest", "at % HEADS * GROUP + g", "at % HEADS + g", "sparq"),
    (triton_token_rest, "add_rest", "LAST is not None", "LAST is None", "sparq_drafts"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "kernel", "old", "new", "name"), TWINS)
def test_a_broken_twin_is_caught(
    module: ModuleType, kernel: str, old: str, new: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        if module is triton_query_parts:
            query_parts.check(query_parts.make_call(BY_NAME[name], torch.float32), "triton")
        elif module is triton_token_rest:
            use_few(monkeypatch)
            token_rest.check(token_rest.make_call(BY_NAME[name], torch.float32), "triton")
        elif module is triton_token_choice:
            call = token_choice.make_call(BY_NAME[name], torch.float32)
            call.total.copy_((call.total * 2.0).round())  # equal ones, too
            for sizes in ("tiles", "all_searched"):
                use_sizes(sizes, monkeypatch)
                token_choice.check(call, "triton")
        else:
            token_scores.check(token_scores.make_call(BY_NAME[name], torch.float32), "triton")

    fails_when_broken(check, module, (kernel,), old, new, tmp_path, monkeypatch)
