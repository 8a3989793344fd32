from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.records import append
from tests.tools.samples import sample
from tools import readme, receipts, serving_table, speed_table, summary_table, support_matrix
from tools.families import FAMILIES, family_of

PROBLEM = {"formula": "causal", "seqlen_q": 8192, "batch": 2, "num_heads_q": 16, "head_dim": 128, "dtype": "bfloat16"}


def test_replaced_touches_only_what_stands_between_the_markers() -> None:
    begin, end = readme.markers("speed")
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    text = readme.replaced(page, "speed", "| new |")
    assert text == page.replace("old", "| new |")
    assert readme.replaced(text, "speed", "| new |") == text
    with pytest.raises(ValueError, match="markers"):
        readme.replaced("no markers", "speed", "| new |")


def test_every_part_has_its_place() -> None:
    for page, parts in readme.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert all(marker in text for part in parts for marker in readme.markers(part))


TODAY = FAMILIES["attention_triton"].hash()


def _fill(
    results: Path, formula: str, question: str, times: dict[str, float], run: str = "new", sources: str = TODAY,
    device: str = "NVIDIA H200",
) -> None:  # fmt: skip
    for impl, time in times.items():
        record = sample(
            question=question, problem={**PROBLEM, "formula": formula}, impl=impl, run=run, device=device,
            sources=sources if impl.startswith("tilewise") else None,
            p20_ms=time, p50_ms=time, p80_ms=time, date=f"2026-0{2 if run == 'new' else 1}-01T00:00:00Z",
        )  # fmt: skip
        append(record, results)


def test_the_table_has_each_peers_time_over_ours(tmp_path: Path) -> None:
    for question, ours in (("attention_forward", 2.0), ("attention_backward", 4.0)):
        _fill(tmp_path, "full", question, {"tilewise.triton": 99.0, "flex": 1.0}, run="old")
        _fill(tmp_path, "full", question, {"tilewise.triton": ours, "flex": 5.0, "cudnn": 1.5})
        _fill(tmp_path, "window", question, {"tilewise.triton": ours, "flex": 3.0})
    lines = speed_table.formulas(tmp_path).splitlines()
    assert lines[0] == "| speedup, forward / backward, over | full | window |"
    assert lines[2] == "| FlexAttention, compiled | 2.50 / 1.25 | 1.50 / 0.75 |"
    assert lines[3] == "| cuDNN | 0.75 / 0.38 |  |"
    assert lines[-1] == "NVIDIA H200, bfloat16, 2026-02-01; batch 2, 16 heads, head_dim 128, 8,192 tokens."


@pytest.mark.parametrize(
    ("of_one", "of_other", "shown"),
    [("f00", TODAY, "H100 80GB HBM3"), ("f00", "f00", "H200"), (TODAY, TODAY, "H200"), (None, "f00", "H100 80GB HBM3")],
)
def test_a_table_is_of_the_gpu_whose_records_are_of_todays_sources(
    of_one: str | None, of_other: str, shown: str, tmp_path: Path
) -> None:
    for sources, device in ((of_one, "NVIDIA H200"), (of_other, "NVIDIA H100 80GB HBM3")):
        for question in speed_table.PASSES if sources else ():
            times = {"tilewise.triton": 2.0, "flex": 5.0}
            _fill(tmp_path, "full", question, times, sources=str(sources), device=device)
    assert f"NVIDIA {shown}, bfloat16" in speed_table.formulas(tmp_path)


def test_a_gpu_with_some_of_a_tables_records_is_not_the_one(tmp_path: Path) -> None:
    for question, device in (
        (speed_table.PASSES[0], "NVIDIA H100 80GB HBM3"),
        *((q, "NVIDIA H200") for q in speed_table.PASSES),
    ):
        sources = TODAY if "H100" in device else "f00"
        _fill(tmp_path, "full", question, {"tilewise.triton": 2.0, "flex": 5.0}, sources=sources, device=device)
    assert "NVIDIA H200, bfloat16" in speed_table.formulas(tmp_path)


def test_records_of_earlier_sources_are_said_to_be_that(tmp_path: Path) -> None:
    for question in ("attention_forward", "attention_backward"):
        _fill(tmp_path, "full", question, {"tilewise.triton": 2.0, "flex": 5.0}, sources="f00")
    assert "| FlexAttention, compiled | 2.50 / 2.50 |" in speed_table.formulas(tmp_path)
    assert "re-measurement pending" in speed_table.formulas(tmp_path)
    dense = {"seqlen_q": 512, "seqlen_k": 512, "batch": 4, "num_heads_q": 2, "num_heads_kv": 2, "head_dim": 64}
    for question in speed_table.EXACT:
        for impl, time in {"tilewise.hopper": 2.0, "cudnn": 3.0}.items():
            problem = {**dense, "formula": "full", "causal": False, "dtype": "bfloat16"}
            times = dict.fromkeys(("p20_ms", "p50_ms", "p80_ms"), time)
            sources = "f00" if impl.startswith("tilewise") else None
            made = sample(question=question, problem=problem, impl=impl, device="NVIDIA H200", sources=sources, **times)
            append(made, tmp_path)
    assert "1.50 / 1.50" in speed_table.exact(tmp_path)
    assert "re-measurement pending" in speed_table.exact(tmp_path)


def test_the_exact_table_has_the_best_peers_time_over_the_rows(tmp_path: Path) -> None:
    base = {"batch": 4, "num_heads_q": 2, "num_heads_kv": 2, "head_dim": 64, "formula": "full", "causal": False}
    dense = {**base, "dtype": "bfloat16"}
    problems = [
        {**dense, "seqlen_q": 512, "seqlen_k": 512},
        {**dense, "seqlen_q": 4096, "seqlen_k": 4096},
        {**dense, "seqlen_q": 8192, "seqlen_k": 8192, "num_heads_kv": 1},
        {**dense, "total": 999},
    ]
    for question, ours in (("exact_forward", 2.0), ("exact_backward", 4.0)):
        for problem in problems:
            times = {"tilewise.hopper": ours, "tilewise.hopper.deterministic": 0.1, "fa4": 5.0, "cudnn": 3.0}
            for impl, time in times.items():
                append(sample(question=question, problem=problem, impl=impl, device="NVIDIA H200", p20_ms=time,
                              p50_ms=time, p80_ms=time, date="2026-02-01T00:00:00Z",
                              sources=TODAY if impl.startswith("tilewise") else None), tmp_path)  # fmt: skip
    lines = speed_table.exact(tmp_path).splitlines()
    assert lines[0].endswith("| 512 tokens | 4,096 tokens |")
    assert lines[2] == "| head_dim 64, full | 1.50 / 0.75 | 1.50 / 0.75 |"
    assert lines[-1].endswith("; grouped queries 1.50 / 0.75; 4 packed documents 1.50 / 0.75.")


def test_what_nobody_would_find_again_is_not_quoted(tmp_path: Path) -> None:
    problem = {"batch": 4, "num_heads_q": 2, "num_heads_kv": 2, "head_dim": 64, "formula": "full", "causal": False,
               "dtype": "bfloat16", "seqlen_q": 512, "seqlen_k": 512}  # fmt: skip
    for question, fastest in (("exact_forward", 1.3), ("exact_backward", 1.4)):  # of a median of 2.0
        for impl, times in {"tilewise.hopper": (fastest, 2.0, 2.5), "cudnn": (3.0, 3.0, 3.0)}.items():
            p20, p50, p80 = times
            append(sample(question=question, problem=problem, impl=impl, p20_ms=p20, p50_ms=p50, p80_ms=p80), tmp_path)
    text = speed_table.exact(tmp_path)
    assert "| head_dim 64, full | – / 1.50 |" in text
    assert "; –: timings of this run vary too much to be quoted." in text


def test_the_table_of_fused_layers_has_the_first_shape_of_each_operation(tmp_path: Path) -> None:
    for question, ours in (("neighbours_forward", 2.0), ("neighbours_backward", 4.0)):
        for operation, shape in (("rope", "16 × 4"), ("rope", "8 × 8"), ("swiglu", "16 × 4")):
            problem = {"operation": operation, "shape": shape, "dtype": "bfloat16"}
            eager = 2.5 if (operation, ours) == ("rope", 2.0) else 6.0  # faster than compiled in one pass
            for impl, time in {"tilewise.triton": ours, "eager": eager, "compile": 3.0, "quack": 0.1}.items():
                append(sample(question=question, problem=problem, impl=impl, device="NVIDIA H200", p20_ms=time,
                              p50_ms=time, p80_ms=time, gbps=1800.0 / time, ceiling_gbps=1000.0,
                              date="2026-02-01T00:00:00Z",
                              sources=TODAY if impl.startswith("tilewise") else None), tmp_path)  # fmt: skip
    lines = speed_table.fused(tmp_path).splitlines()
    assert lines[2:4] == [
        "| `rope` | 16 × 4 | 0.90 / 0.45 | 1.25 (eager) / 0.75 |",
        "| `swiglu` | 16 × 4 | 0.90 / 0.45 | 1.50 / 0.75 |",
    ]
    assert lines[-1].startswith("NVIDIA H200, bfloat16, 2026-02-01.")


TIMES = {"sage2": 2.0, "int8_blocks": 0.75, "fp8": 1.0, "blocks": 0.5}  # of schemes


def test_quantized_and_sparse_tables_have_speedups_over_the_exact_kernels(tmp_path: Path) -> None:
    def fill(question: str, problem: dict[str, object], times: dict[str, float]) -> None:
        for impl, time in times.items():
            append(sample(question=question, problem={"dtype": "bfloat16", **problem}, impl=impl, device="NVIDIA H200",
                          p20_ms=time, p50_ms=time, p80_ms=time, date="2026-02-01T00:00:00Z",
                          sources=TODAY if impl.startswith("tilewise") else None), tmp_path)  # fmt: skip

    for length, exact in ((4096, 6.0), (512, 3.0)):
        codes = {f"tilewise.hopper_codes.{name}": time for name, time in TIMES.items()}
        kernels = {f"{impl}.kernel": time / 2 for impl, time in codes.items()}
        fill("few_bits_forward", {"head_dim": 64, "formula": "full", "seqlen_q": length},
             {"tilewise.hopper": exact, **codes, **kernels})  # fmt: skip
    fill("sliding_tile", {"formula": "sliding_tile((2, 2), (1, 1)), 9% of the pairs", "seqlen_q": 4},
         {"tilewise.hopper.sliding": 2.0, "tilewise.hopper_codes.sliding": 1.5,
          "tilewise.hopper_codes.sliding_int8": 1.0, "tilewise.hopper_codes.sliding_int8_blocks": 1.2,
          "cudnn": 9.0})  # fmt: skip
    for length, dense in ((1024, 1.0), (2048, 8.0)):
        fill("sparse_whole", {"formula": "15% of the tiles", "seqlen_q": length},
             {"tilewise.hopper.dense": dense, "tilewise.hopper.selected": 2.0,
              "tilewise.hopper_codes.selected": 1.0})  # fmt: skip
    fill("sparse_whole", {"operation": "demo", "formula": "30% of the tiles", "seqlen_q": 4096},
         {"tilewise.hopper.dense": 5.0, "tilewise.hopper.selected": 2.0,
          "tilewise.hopper_codes.selected": 1.0})  # fmt: skip
    lines = speed_table.quantized(tmp_path).splitlines()
    assert lines[0].endswith("| 512 tokens | 4,096 tokens |")
    assert lines[2:6] == [
        "| `Sage2()`, head_dim 64, full | 1.50 / 3.00 | 3.00 / 6.00 |",
        "| INT8, block scales, head_dim 64, full | 4.00 / 8.00 | 8.00 / 16.00 |",
        '| `Sage("fp8")`, head_dim 64, full | 3.00 / 6.00 | 6.00 / 12.00 |',
        '| `FP8("block", "block", "block")`, head_dim 64, full | 6.00 / 12.00 | 12.00 / 24.00 |',
    ]
    assert speed_table.sparse(tmp_path).splitlines()[2:-2] == [
        "| `sliding_tile((2, 2), (1, 1))` | 9% of the pairs | 4.50 | 9.00 | cuDNN |",
        "| `Sparge`, 1,024 tokens | 15% of the tiles | 0.50 | 1.00 | tilewise, exact |",
        "| `Sparge`, 2,048 tokens | 15% of the tiles | 4.00 | 8.00 | tilewise, exact |",
        "| `Sparge`, 4,096 tokens, the demo's model | 30% of the tiles | 2.50 | 5.00 | tilewise, exact |",
    ]
    fill("sliding_tile", {"formula": "sliding_tile((2, 2), (1, 1)), 9% of the pairs", "seqlen_q": 4}, {"fa4": 6.0})
    assert "| 9% of the pairs | 3.00 | 6.00 | FlashAttention-4 |" in speed_table.sparse(tmp_path)
    lines = summary_table.table(tmp_path).splitlines()
    assert lines[2:6] == [
        "| `quantize=tw.Sage2()`, quantisation included, 512 tokens | exact attention | 1.50× |  |",
        "| `quantize=tw.Sage2()`, quantisation included, 4,096 tokens | exact attention | 3.00× |  |",
        "| `mask=tw.sliding_tile(...)`, 9% of the pairs | FlashAttention-4, all pairs | 3.00× |  |",
        "| `select=tw.Sparge(...)`, 15–30% of the tiles | tilewise, exact, all pairs | 0.50–4.00× |  |",
    ]


def test_the_summary_has_the_lowest_and_the_highest_speedup(tmp_path: Path) -> None:
    base = {"batch": 4, "num_heads_q": 2, "num_heads_kv": 2, "head_dim": 64, "formula": "full", "causal": False,
            "dtype": "bfloat16"}  # fmt: skip

    def fill(question: str, problem: dict[str, object], times: dict[str, float], date: str) -> None:
        for impl, time in times.items():
            sources = TODAY if impl.startswith("tilewise") else None
            append(sample(question=question, problem={**base, **problem}, impl=impl, sources=sources, p20_ms=time,
                          p50_ms=time, p80_ms=time, date=f"2026-02-0{date}T00:00:00Z"), tmp_path)  # fmt: skip

    for length, peer in ((512, 1.0), (4096, 3.0)):
        for question in speed_table.EXACT:
            fill(question, {"seqlen_q": length, "seqlen_k": length}, {"tilewise.hopper": 2.0, "cudnn": peer}, "1")
        codes = {f"tilewise.hopper_codes.{name}{end}": time for name, time in TIMES.items() for end in ("", ".kernel")}
        fill("few_bits_forward", {"seqlen_q": length}, {"tilewise.hopper": peer, **codes}, "2")
    for question in speed_table.PASSES:
        fill(question, {"seqlen_q": 8192}, {"tilewise.hopper": 2.0, "flex": 5.0}, "3")
    lines = summary_table.table(tmp_path).splitlines()
    assert lines[2:4] == [
        "| exact attention, head_dim 64, 512–4,096 tokens | fastest of cuDNN, FlashAttention-2 and -4 | 0.50–1.50× "
        "| 0.50–1.50× |",
        "| masks and scores as formulas, 8,192 tokens | FlexAttention, compiled | 2.50× | 2.50× |",
    ]
    assert lines[-1] == "NVIDIA H200, bfloat16, 2026-02-01 to 2026-02-03."
    said = " ".join(summary_table.headline(tmp_path).split())
    assert "measured 2026-02-01 to -03: 0.50–1.50×" in said
    assert "0.50–1.50× the fastest of cuDNN" in said
    assert "`Sage2()` 1.50× exact attention at 4,096 tokens, 0.50× at 512." in said


def test_the_table_of_serving_has_rates_beside_peers_and_what_is_gained(tmp_path: Path) -> None:
    today = FAMILIES["attention_decode_hopper"].hash()
    base = {"num_heads_q": 8, "num_heads_kv": 2, "head_dim": 64, "dtype": "bfloat16", "batch": 4, "tokens": 400}

    ours = serving_table.OURS

    def fill(question: str, problem: dict[str, object], times: dict[str, float]) -> None:
        for impl, time in times.items():
            append(sample(question=question, problem={**base, **problem}, impl=impl, device="NVIDIA H200", p20_ms=time,
                          p50_ms=time, p80_ms=time, gbps=12.0 / time, date="2026-02-01T00:00:00Z",
                          sources=today if impl.startswith("tilewise") else None), tmp_path)  # fmt: skip

    for page_size, slower in ((16, 1.0), (1, 2.0)):
        for lengths, theirs in (("equal", 3.0), ("zipf", 6.0)):
            fill("decode", {"lengths": lengths, "page_size": page_size}, {ours: 4.0 * slower, "flashinfer": theirs})
    fill("decode", {"lengths": "equal", "page_size": 16, "batch": 1}, {ours: 2.0, "cudnn.contiguous": 1.0})
    fill("decode_encoded", {"workload": "4 × 100"}, {ours: 6.0, f"{ours}.int8": 4.0})
    shared = {ours: 5.0, f"{ours}.shared": 2.0, f"{ours}.copies": 8.0}
    fill("decode_shared", {"workload": "4 × 100, 50 shared"}, shared)
    for page_size in (64, 256):
        times = {ours: 7.0, f"{ours}.pages": 1.0 if page_size == 256 else 0.5, "cudnn.contiguous": 6.0}
        fill("selected_pages", {"lengths": "equal", "page_size": page_size, "num_heads_kv": 8, "read": "1/8"}, times)
    said = summary_table.table(tmp_path)
    assert "| paged decode, equal and uniform lengths, planning included | FlashInfer, planned before | 0.75× |" in said
    assert "| paged decode, Zipf lengths, planning included | FlashInfer, planned before | 1.50× |" in said
    lines = serving_table.table(tmp_path).splitlines()
    assert lines[0] == "| bandwidth over that of | 4 × 100 | 1 × 400 |"
    assert lines[2:6] == [
        "| cuDNN over contiguous keys, equal lengths |  | 0.50 |",
        "| FlashInfer, equal lengths | 0.75 |  |",
        "| FlashInfer, uniform lengths |  |  |",
        "| FlashInfer, Zipf lengths | 1.50 |  |",
    ]
    assert lines[-1] == (
        "NVIDIA H200, bfloat16, 2026-02-01; 8 query heads, 2 KV heads, head_dim 64, pages of 16 tokens."
    )
    assert serving_table.gains(tmp_path).splitlines()[2:] == [
        "| INT8 KV cache | 4 × 100 | a bfloat16 cache | 1.50 |",
        "| shared prefix | 4 × 100, 50 shared | a copy of the prefix in each sequence | 4.00 |",
        "| `TopPages`, an eighth of the pages | 4 × 100 tokens, 8 KV heads, pages of 256 tokens | all pages | 6.00 |",
        "",
        "NVIDIA H200, bfloat16, 2026-02-01.",
    ]


def test_without_records_the_tables_say_so(tmp_path: Path) -> None:
    for table in (serving_table.table, serving_table.gains, speed_table.fused, speed_table.formulas, speed_table.exact,
                  speed_table.quantized, speed_table.sparse, summary_table.table):  # fmt: skip
        assert table(tmp_path) == "No records yet."
    assert summary_table.headline(tmp_path) == "* **Speed**: no records yet."


def test_needs_that_others_imply_are_left_out_and_several_preferences_are_numbered() -> None:
    found = {row.name: row for row in support_matrix.rows("attention")}
    mixed, hopper = (support_matrix.needs(found[name]) for name in ("hopper_mixed", "hopper"))
    assert mixed.count("not encoded") == 1
    assert "int4" not in mixed
    assert "dense" not in mixed
    assert "; a mask of one run of keys per query; " in mixed
    assert "keys that are not paged, or strides" in hopper
    assert re.findall(r"\((\d)\) ", hopper.partition("default only for calls with all of: ")[2]) == list("1234")
    said = {need.says for row in found.values() for need in row.needs}
    named = {*support_matrix.IMPLIED, *(other for others, _ in support_matrix.IMPLIED.values() for other in others)}
    assert named <= said, "a need has other words now"


def test_the_runs_on_gpus_are_counted(tmp_path: Path) -> None:
    def run(family: str, sources: str, failed: int = 0) -> None:
        receipt = receipts.Receipt(family, sources, "NVIDIA H200", None, "2", "3", "abc", "2026-02-01T00:00:00Z", "",
                                   {"passed": 9, "failed": failed})  # fmt: skip
        receipts.append(receipt, tmp_path)

    total = sum(
        (family := family_of(row.name, operation)) is not None and bool(family.ci)
        for operation in support_matrix.OPERATIONS
        for row in support_matrix.rows(operation)
    )
    assert support_matrix.gpu_runs(tmp_path) == (
        f"GPU runs of the current sources: 0 of {total} implementations. Of the others, {total} have not passed on a "
        "GPU yet."
    )
    run("norm_triton", FAMILIES["norm_triton"].hash())
    run("softmax_triton", "f00")
    run("glu_triton", "f00", failed=1)
    assert support_matrix.gpu_runs(tmp_path) == (
        f"GPU runs of the current sources: 1 of {total} implementations. Of the others, 1 passed on NVIDIA H200 at an "
        f"earlier commit and {total - 2} have not passed on a GPU yet."
    )


def test_layouts_of_implementations_follow_from_what_they_need() -> None:
    found = {row.name: row for row in support_matrix.rows("attention")}
    assert support_matrix.layouts(found["triton"]) == {"dense", "packed"}
    assert support_matrix.layouts(found["triton_paged"]) == {"paged"}
    assert support_matrix.layouts(found["triton_paged"], backward=True) == set()
    assert support_matrix.layouts(found["hopper"]) == {"dense", "packed", "paged"}
    assert support_matrix.layouts(found["hopper"], backward=True) == {"dense", "packed"}
    said = {need.says for row in found.values() for need in row.needs}
    assert {*support_matrix.KEEPS, *support_matrix.NO_BACKWARD} <= said, "a need has other words now"
