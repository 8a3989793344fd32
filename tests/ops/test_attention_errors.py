"""Bad input: an exception of the library's own, with name, got, expected, before any work; and what `why` says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core import dispatch
from tilewise.core.errors import FormulaError, InputError, TilewiseError, UnsupportedError
from tilewise.ops.attention import table
from tilewise.ops.attention.problem import make_call
from tilewise.ops.attention.table import ROWS


def tensors(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


def good() -> dict[str, Any]:
    return {"q": tensors(2, 6, 4, 8), "k": tensors(2, 9, 2, 8), "v": tensors(2, 9, 2, 8)}


def packed(cu_q: Any, cu_k: Any = None, total_q: int = 6, total_k: int = 9) -> dict[str, Any]:
    as_tensor = [torch.tensor(c, dtype=torch.int32) if isinstance(c, list) else c for c in (cu_q, cu_k)]
    q, k = tensors(total_q, 4, 8), tensors(total_k, 2, 8)
    return {"q": q, "k": k, "v": k, "layout": tw.Packed(*as_tensor)}


def branching(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i > j) if i > 3 else (j > i)


IDS = torch.tensor([0, 1, 2, 3])
FAR = torch.tensor([0, 1, 99])
PAIR = torch.tensor([1, 0])
COMPLEX, WORDS = torch.zeros(4, dtype=torch.complex64), torch.zeros(9, dtype=torch.uint16)

# name of the problem -> (changed arguments, exception, what its `name` starts with, what `got` contains)
BAD: dict[str, tuple[dict[str, Any], type[TilewiseError], str, str]] = {
    "divisor_of_positions": ({"mask": lambda b, h, i, j: i % j == 0}, FormulaError, "mask: divisor", "j, which"),
    "divisor_captured": (
        {"score": lambda s, b, h, i, j: s + (i // PAIR[b])},
        FormulaError,
        "score: divisor",
        "which may be 0",
    ),
    "q_not_a_tensor": ({"q": [1.0]}, InputError, "q", "list"),
    "k_is_none": ({"k": None}, InputError, "k", "NoneType"),
    "q_rank_3": ({"q": tensors(6, 4, 8)}, InputError, "q", "(6, 4, 8)"),
    "v_rank_5": ({"v": tensors(1, 2, 9, 2, 8)}, InputError, "v", "(1, 2, 9, 2, 8)"),
    "k_v_lengths": ({"v": tensors(2, 8, 2, 8)}, InputError, "v", "(2, 8, 2, 8)"),
    "k_v_heads": ({"v": tensors(2, 9, 4, 8)}, InputError, "v", "(2, 9, 4, 8)"),
    "head_dims": ({"q": tensors(2, 6, 4, 16)}, InputError, "k", "head_dim 8"),
    "batch": ({"q": tensors(3, 6, 4, 8)}, InputError, "k", "batch 2"),
    "head_ratio": ({"q": tensors(2, 6, 3, 8)}, InputError, "k", "2 heads"),
    "more_kv_heads": ({"q": tensors(2, 6, 1, 8)}, InputError, "k", "2 heads"),
    "many_heads": ({"q": torch.empty(2, 6, 2**21, 8)}, InputError, "q", "2097152 query heads of 8"),
    "no_heads": ({"q": tensors(2, 6, 0, 8)}, InputError, "k", "2 heads"),
    "no_kv_heads": ({"k": tensors(2, 9, 0, 8), "v": tensors(2, 9, 0, 8)}, InputError, "k", "0 heads"),
    "head_dim_0": (
        {"q": tensors(2, 6, 4, 0), "k": tensors(2, 9, 2, 0), "v": tensors(2, 9, 2, 0)},
        InputError,
        "q",
        "head_dim 0",
    ),
    "head_dim_513": (
        {"q": tensors(1, 2, 1, 513), "k": tensors(1, 2, 1, 513), "v": tensors(1, 2, 1, 8)},
        InputError,
        "q",
        "head_dim 513",
    ),
    "head_dim_v_600": ({"v": tensors(2, 9, 2, 600)}, InputError, "v", "head_dim 600"),
    "dtype_mix": ({"k": tensors(2, 9, 2, 8, dtype=torch.float64)}, InputError, "k", "float64"),
    "dtype_integer": ({n: x.int() for n, x in good().items()}, InputError, "q", "int32"),
    "dtype_float8": ({n: x.to(torch.float8_e4m3fn) for n, x in good().items()}, InputError, "q", "float8"),
    "dtype_complex": ({n: x.to(torch.complex64) for n, x in good().items()}, InputError, "q", "complex64"),
    "device_mix": ({"v": tensors(2, 9, 2, 8, device="meta")}, InputError, "v", "meta"),
    "stride": ({"q": tensors(2, 6, 8, 4).transpose(2, 3)}, InputError, "q", "strides"),
    "layout_type": ({"layout": "packed"}, InputError, "layout", "str"),
    "packed_but_rank_4": (
        {"layout": tw.Packed(torch.tensor([0, 6], dtype=torch.int32))},
        InputError,
        "q",
        "(2, 6, 4, 8)",
    ),
    "cu_seqlens_falls": (packed([0, 4, 3, 6], [0, 3, 6, 9]), InputError, "layout cu_seqlens_q", "3 after 4"),
    "cu_seqlens_k_falls": (packed([0, 3, 4, 6], [0, 7, 5, 9]), InputError, "layout cu_seqlens_k", "5 after 7"),
    "cu_seqlens_short": (packed([0, 4, 5], [0, 3, 9]), InputError, "layout cu_seqlens_q", "last 5"),
    "cu_seqlens_long": (packed([0, 4, 7], [0, 3, 9]), InputError, "layout cu_seqlens_q", "last 7"),
    "cu_seqlens_start": (packed([1, 4, 6], [0, 3, 9]), InputError, "layout cu_seqlens_q", "first 1"),
    "cu_seqlens_k_total": (packed([0, 4, 6]), InputError, "layout cu_seqlens_k", "last 6"),
    "cu_seqlens_counts": (packed([0, 4, 6], [0, 9]), InputError, "layout cu_seqlens_k", "(2,)"),
    "cu_seqlens_dtype": (packed(torch.tensor([0.0, 6.0]), [0, 9]), InputError, "layout cu_seqlens_q", "float32"),
    "cu_seqlens_rank": (
        packed(torch.zeros(2, 2, dtype=torch.int32), [0, 9]),
        InputError,
        "layout cu_seqlens_q",
        "(2, 2)",
    ),
    "cu_seqlens_list": (
        {**packed([0, 6], [0, 9]), "layout": tw.Packed([0, 6])},
        InputError,
        "layout cu_seqlens_q",
        "list",
    ),
    "cu_seqlens_empty": (packed(torch.zeros(0, dtype=torch.int32), [0, 9]), InputError, "layout cu_seqlens_q", "(0,)"),
    "sink_shape": ({"sink": tensors(2)}, InputError, "sink", "(2,)"),
    "sink_integer": ({"sink": tensors(4, dtype=torch.int64)}, InputError, "sink", "int64"),
    "sink_number": ({"sink": 1.0}, InputError, "sink", "float"),
    "sink_device": ({"sink": tensors(4, device="meta")}, InputError, "sink", "meta"),
    "scale_nan": ({"scale": float("nan")}, InputError, "scale", "nan"),
    "scale_inf": ({"scale": float("inf")}, InputError, "scale", "inf"),
    "scale_text": ({"scale": "0.5x"}, InputError, "scale", "0.5x"),
    "dropout_one": ({"dropout": 1.0}, InputError, "dropout", "1.0"),
    "dropout_negative": ({"dropout": -0.1}, InputError, "dropout", "-0.1"),
    "dropout_nan": ({"dropout": float("nan")}, InputError, "dropout", "nan"),
    "dropout_text": ({"dropout": "0.5"}, InputError, "dropout", "0.5"),
    "seed_negative": ({"dropout": 0.1, "seed": -1}, InputError, "seed", "-1"),
    "seed_large": ({"dropout": 0.1, "seed": 2**63}, InputError, "seed", "9223372036854775808"),
    "seed_float": ({"dropout": 0.1, "seed": 0.5}, InputError, "seed", "0.5"),
    "seed_shape": ({"dropout": 0.1, "seed": torch.tensor([1, 2])}, InputError, "seed", "tensor"),
    "seed_dtype": ({"dropout": 0.1, "seed": torch.tensor([1], dtype=torch.int32)}, InputError, "seed", "tensor"),
    "impl_unknown": ({"impl": "cuda"}, InputError, "impl", "cuda"),
    "impl_cannot": ({"impl": "cpu_sdpa", "mask": tw.window(3)}, UnsupportedError, "impl='cpu_sdpa'", "it cannot run"),
    "mask_type": ({"mask": True}, FormulaError, "mask", "bool"),
    "mask_dense_tensor": ({"mask": tensors(6, 9, dtype=torch.bool)}, FormulaError, "mask", "torch.bool tensor (6, 9)"),
    "mask_given_a_score": ({"mask": tw.softcap(3.0)}, FormulaError, "mask", "Score"),
    "score_given_a_mask": ({"score": tw.causal}, FormulaError, "score", "Mask"),
    "mask_branches": ({"mask": branching}, FormulaError, "bool() of a traced value at", "(3 < i)"),
    "mask_unsupported_operation": (
        {"mask": lambda b, h, i, j: torch.cummax(i, 0) > j},
        FormulaError,
        "torch.cummax at",
        "a traced value",
    ),
    "mask_not_boolean": ({"mask": lambda b, h, i, j: i - j}, FormulaError, "mask function", "int expression"),
    "mask_and_mask": ({"mask": lambda b, h, i, j: tw.causal and True}, FormulaError, "bool(mask)", "causal"),
    "captured_device": (
        {"mask": tw.prefix(tensors(2, dtype=torch.int64, device="meta"))},
        InputError,
        "mask: captured tensor 0",
        "meta",
    ),
    "index_beyond_keys": (
        {"mask": tw.document(IDS)},
        FormulaError,
        "mask: index 0 into captured tensor 0",
        "reaches 3 to 8",
    ),
    "index_beyond_batch": (
        {"mask": tw.lengths(IDS[:1])},
        FormulaError,
        "mask: index 0 into captured tensor 0",
        "reaches 0 to 1",
    ),
    "index_beyond_heads": ({"score": tw.alibi(tensors(3))}, FormulaError, "score: index 0", "reaches 0 to 3"),
    "q_nested": ({"q": torch.nested.nested_tensor([tensors(6, 4, 8)] * 2)}, InputError, "q", "nested"),
    "k_jagged": (
        {"k": torch.nested.nested_tensor([tensors(9, 2, 8), tensors(3, 2, 8)], layout=torch.jagged)},
        InputError,
        "k",
        "nested",
    ),
    "q_sparse": ({"q": tensors(2, 6, 4, 8).to_sparse()}, InputError, "q", "sparse"),
    "captured_complex": (
        {"score": lambda s, b, h, i, j: s + COMPLEX[h]},
        InputError,
        "score: captured tensor 0",
        "complex",
    ),
    "captured_uint16": ({"mask": lambda b, h, i, j: WORDS[j] > 0}, InputError, "mask: captured tensor 0", "uint16"),
    "scale_learned": ({"scale": torch.tensor(0.3, requires_grad=True)}, InputError, "scale", "takes a gradient"),
    "index_not_monotone_in_heads": (
        {"score": lambda s, b, h, i, j: s + FAR[2 - abs(h - 3)]},
        FormulaError,
        "score: index 0",
        "reaches -1 to 2",
    ),
    "index_not_monotone_in_batch": (
        {
            "q": tensors(4, 6, 4, 8),
            "k": tensors(4, 9, 2, 8),
            "v": tensors(4, 9, 2, 8),
            "mask": lambda b, h, i, j: PAIR[b % 3] > 0,
        },
        FormulaError,
        "mask: index 0",
        "reaches 0 to 2",
    ),
    "index_negative": (
        {"score": lambda s, b, h, i, j: s + tensors(20)[i - j]},
        FormulaError,
        "score: index 0",
        "reaches -5 to 8",
    ),
    "index_from_values": (
        {"mask": lambda b, h, i, j: IDS[FAR[h % 3]] > j},
        FormulaError,
        "mask: index 0",
        "reaches 0 to 99",
    ),
    "index_unbounded": (
        {"score": lambda s, b, h, i, j: s + tensors(20)[s.to(torch.int32)]},
        FormulaError,
        "score: index 0",
        "unbounded",
    ),
    "explicit_too_small": (
        {"mask": tw.explicit(tensors(5, 9, dtype=torch.bool))},
        FormulaError,
        "mask: index 2",
        "reaches -1",
    ),
    "negative_position": (
        {"q": tensors(2, 12, 4, 8), "mask": tw.document(torch.arange(9))},
        FormulaError,
        "mask: index 0",
        "reaches -3 to 8",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, kind, said, got = BAD[name]
    monkeypatch.setattr(dispatch, "_function", lambda *_: pytest.fail("an implementation was asked to run"))
    with pytest.raises(kind) as caught:
        tw.attention(**{**good(), **changed})
    error = caught.value
    assert isinstance(error, TilewiseError)
    assert error.name.startswith(said)
    assert got in str(error.got)
    assert error.expected
    assert error.hint
    assert str(error).startswith(f"{error.name}: got {error.got}; expected {error.expected}")


@pytest.mark.parametrize("name", [name for name, (changed, *_) in BAD.items() if "impl" not in changed])
def test_why_refuses_the_same_input(name: str) -> None:
    changed, kind, _, _ = BAD[name]
    with pytest.raises(kind):
        tw.why(**{**good(), **changed})


def test_packed_indices_are_checked_over_all_sequences() -> None:
    short = packed([0, 4, 6], [0, 3, 9])
    with pytest.raises(FormulaError, match="captured tensor 0"):
        tw.attention(**short, mask=tw.lengths(torch.tensor([3])))
    with pytest.raises(FormulaError, match="captured tensor 0"):
        tw.attention(**short, mask=lambda b, h, i, j: torch.zeros(5)[j] > 0)
    assert tw.attention(**short, mask=tw.lengths(torch.tensor([3, 6]))).shape == (6, 4, 8)


def test_good_input_is_not_refused() -> None:
    assert tw.attention(**good()).shape == (2, 6, 4, 8)
    assert tw.attention(**good(), scale=torch.tensor(0.5), dropout=0, seed=3).shape == (2, 6, 4, 8)
    assert tw.attention(**packed([0, 4, 6], [0, 3, 9])).shape == (6, 4, 8)
    one = {"q": tensors(2, 6, 4, 1).expand(2, 6, 4, 1), "k": tensors(2, 9, 2, 1), "v": tensors(2, 9, 2, 3)}
    assert tw.attention(**one).shape == (2, 6, 4, 3)


# why ---------------------------------------------------------------------------------------------------------------


def test_why_says_who_runs_and_why_not_the_others() -> None:
    found = tw.why(**good(), mask=tw.causal)
    verdicts = {name: verdict for name, _, verdict in found.rows}
    assert found.chosen == "cpu_tiled"
    assert list(verdicts) == [row.name for row in ROWS]
    assert verdicts["cpu_tiled"].startswith("chosen: ")
    assert verdicts["cpu_sdpa"].startswith("takes no score formula, and no mask but causal")
    assert verdicts["cpu_sdpa"].endswith("got causal with seqlen_q 6, seqlen_k 9")
    assert verdicts["reference"] == "available only with impl='reference'"
    text = str(tw.why(**good(), mask=tw.causal, all=True))
    assert text.count("\n") == len(ROWS) - 1
    assert sum(line.startswith(">") for line in text.splitlines()) == 1
    assert "> cpu_tiled" in text


@pytest.mark.parametrize(
    ("shape", "mask", "got"),
    [
        ((2, 512, 16, 64), None, None),
        ((2, 513, 14, 64), tw.causal, None),
        ((1, 512, 16, 64), tw.causal, "got 64"),
        ((2, 512, 16, 64), tw.window(9), "got 64 and a window"),
        ((2, 512, 16, 80), tw.window(9), None),
    ],
)
def test_unless_named_hopper_kernels_take_what_they_are_best_at(
    shape: tuple[int, ...], mask: tw.Mask | None, got: str | None
) -> None:
    q, k, v = (tensors(*shape, dtype=torch.bfloat16) for _ in range(3))
    deferred = table.named("hopper").deferred(make_call(q, k, v, mask=mask))
    assert deferred == got or (got and deferred and deferred.endswith(got))


@pytest.mark.parametrize(
    ("queries", "got"),
    [
        ((2000, *(1,) * 63), None),
        ((300, 0), None),
        ((1,) * 64, "got 64 of 1 queries in the mean"),
        ((16,) * 64, "got 64 of 16 queries in the mean"),
        ((17,) * 64, None),
        ((5000, *(1,) * 9), "got 10 of 500 queries in the mean"),
        ((200,), "got 1 of 200 queries in the mean"),
    ],
    ids=["mixed", "two", "decode", "verify", "more", "prompts", "alone"],
)
def test_unless_named_both_hopper_kernels_take_prompts_beside_requests_that_decode(
    queries: tuple[int, ...], got: str | None
) -> None:
    pool = tensors(8, 16, 8, 64, dtype=torch.bfloat16)
    ends = torch.tensor([0, *queries]).cumsum(0).int()
    layout = tw.Paged(torch.zeros(len(queries), 400, dtype=torch.int32), torch.tensor(queries).int(), ends)
    call = make_call(tensors(sum(queries), 32, 64, dtype=torch.bfloat16), pool, pool, layout=layout)
    deferred = table.named("hopper_mixed").deferred(call)
    assert deferred == got or (got and deferred and deferred.endswith(got))


def test_unless_named_hopper_kernels_leave_gradients_of_captured_tensors() -> None:
    q, k, v = (tensors(2, 512, 16, 64, dtype=torch.bfloat16) for _ in range(3))
    call = make_call(q, k, v, score=tw.alibi(torch.ones(16, requires_grad=True)))
    assert str(table.named("hopper").deferred(call)).endswith("got some wanted")


UNMET = {
    "score": ({"score": tw.softcap(2.0)}, "a score formula"),
    "mask": ({"mask": tw.window(3)}, "a mask other than causal"),
    "sink": ({"sink": tensors(4)}, "a sink"),
    "dropout": ({"dropout": 0.25}, "dropout 0.25"),
    "head_dim_v": ({"v": tensors(2, 9, 2, 16)}, "head_dim 8, head_dim_v 16"),
    "packed": (packed([0, 4, 6], [0, 3, 9]), "packed"),
}


@pytest.mark.parametrize("name", UNMET)
def test_the_fused_row_names_its_first_unmet_need(name: str) -> None:
    arguments, got = UNMET[name]
    verdict = next(v for n, _, v in tw.why(**{**good(), **arguments}).rows if n == "cpu_sdpa")
    assert verdict.endswith(f"got {got}")
    with pytest.raises(UnsupportedError, match=r"cpu_sdpa.*" + got):
        tw.attention(**{**good(), **arguments}, impl="cpu_sdpa")


def test_why_of_a_named_implementation() -> None:
    assert tw.why(**good(), impl="reference").chosen == "reference"
    assert tw.why(**good(), impl="cpu_sdpa", mask=tw.window(2)).chosen is None
    verdicts = {name: verdict for name, _, verdict in tw.why(**good(), impl="reference").rows}
    assert verdicts["cpu_tiled"] == "can run this call, but impl='reference' was named"
    verdicts = {name: verdict for name, _, verdict in tw.why(**good(), impl="triton").rows}
    assert verdicts["cpu_tiled"] == "can run this call, but impl='triton' was named"


def test_why_of_an_unknown_implementation() -> None:
    with pytest.raises(InputError, match="impl: got 'nope'; expected None or one of cpu_sdpa"):
        tw.why(**good(), impl="nope")


def test_an_implementation_is_never_swapped_silently() -> None:
    with pytest.raises(UnsupportedError, match="why"):
        tw.attention(**good(), impl="cpu_sdpa", sink=tensors(4))


def test_what_is_remembered_of_a_choice_is_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one signature that differ in everything else a need looks at: the same row or error as found anew."""
    q, k, v = (tensors(2, 16, heads, 8) for heads in (4, 2, 2))
    slopes = torch.ones(4, requires_grad=True)
    changes: list[dict[str, Any]] = [{}, {"sink": tensors(4)}, {"dropout": 0.5}, {"deterministic": True}]
    changes += [{"batch_invariant": True}, {"quantize": tw.Sage2()}]
    pages = torch.tensor([[0], [1]], dtype=torch.int32)  # k and v are a pool of two
    changes.append({"layout": tw.Paged(pages, torch.tensor([16, 9], dtype=torch.int32))})
    chosen = set()
    for interpret, formula, gradient, changed, impl in itertools.product(
        ("1", "0"), ({}, {"mask": tw.causal}, {"score": tw.alibi(slopes.detach())}, {"score": tw.alibi(slopes)}),
        (False, True), changes, (None, *(row.name for row in ROWS)),
    ):  # fmt: skip
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        with torch.set_grad_enabled(gradient):
            call = make_call(q.requires_grad_(gradient), k, v, **formula, **changed)
        found = []
        for choose in (table.choose, table._choose):
            try:
                found.append(choose(call, impl).name)
            except UnsupportedError as error:
                found.append(str(error))
        assert found[0] == found[1]
        chosen.add(found[0])
    without = {"hopper", "hopper_codes", "hopper_decode", "hopper_mixed"}  # which nothing stands for without such a GPU
    assert {row.name for row in ROWS} - without <= chosen
