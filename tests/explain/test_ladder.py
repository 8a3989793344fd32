"""Every rung counts what its formula says, and computes what float64 NumPy computes."""

import runpy

import numpy as np
import pytest

from tilewise.core.errors import InputError
from tilewise.explain import ladder
from tilewise.explain.ladder.slow_memory import Counts, SlowMemory

ATTENTION = [name for name in ladder.ORDER if "attention" in name or name == "split_kv"]
OPTIONS = {
    "flash_attention_1": [{"fast_memory": 64}, {"fast_memory": 200}, {"fast_memory": 10_000}],
    "flash_attention_2": [
        {"block_m": m, "block_n": n, "causal": c} for m, n in ((1, 1), (4, 8), (16, 5)) for c in (0, 1)
    ],
    "split_kv": [{"splits": s} for s in (1, 3, 4, 50)],
}
SIZES = [(1, 1, 1, 1), (7, 7, 4, 4), (16, 16, 8, 8), (5, 17, 6, 3), (19, 6, 4, 8)]
# float64 rounding of a few dozen terms of size at most about 10; a wrong formula errs by far more.
TOLERANCE = 1e-12


@pytest.mark.parametrize("size", [(1, 1, 1), (4, 4, 4), (32, 32, 32), (5, 9, 13), (17, 3, 8)])
def test_matmul(size: tuple[int, int, int]) -> None:
    m, n, k = size
    random = np.random.default_rng(0)
    a, b = random.standard_normal((m, k)), random.standard_normal((k, n))
    naive, tiled = ladder.rung("matmul_naive"), ladder.rung("matmul_tiled")
    c, counts = naive.run(a, b)
    np.testing.assert_allclose(c, a @ b, atol=TOLERANCE)
    assert counts == naive.closed_form(m, n, k)
    for tile in (1, 3, 8, 16, 64):
        c, counts = tiled.run(a, b, tile=tile)
        np.testing.assert_allclose(c, a @ b, atol=TOLERANCE)
        assert counts == tiled.closed_form(m, n, k, tile=tile)
    assert tiled.closed_form(m, n, k, tile=1) == naive.closed_form(m, n, k)


def test_matmul_32_by_32_reads_65536_against_4096() -> None:
    assert ladder.climb("matmul_naive", size=32).counts.loads == 65_536
    assert ladder.climb("matmul_tiled", size=32, tile=16).counts.loads == 4_096


@pytest.mark.parametrize("name", ["softmax_three_pass", "softmax_online"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 10), (4, 33)])
def test_softmax(name: str, shape: tuple[int, int]) -> None:
    x = 300 * np.random.default_rng(1).standard_normal(shape)  # exp(300) squared would overflow: the maximum must go
    x[0, 0] = 800.0
    y, counts = ladder.rung(name).run(x)
    np.testing.assert_allclose(y, ladder.softmax(x), atol=TOLERANCE)
    np.testing.assert_allclose(y.sum(axis=1), 1.0, atol=TOLERANCE)
    assert counts == ladder.rung(name).closed_form(*shape)


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name in ATTENTION for options in [{}, *OPTIONS.get(name, [])]]
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_attention(name: str, options: dict[str, int], size: tuple[int, int, int, int]) -> None:
    seqlen_q, seqlen_k, head_dim, head_dim_v = size
    random = np.random.default_rng(2)
    q = 4 * random.standard_normal((seqlen_q, head_dim))
    k, v = random.standard_normal((seqlen_k, head_dim)), random.standard_normal((seqlen_k, head_dim_v))
    o, counts = ladder.rung(name).run(q, k, v, **options)
    np.testing.assert_allclose(o, ladder.attention(q, k, v, causal=bool(options.get("causal"))), atol=TOLERANCE)
    assert counts == ladder.rung(name).closed_form(*size, **options)


def test_reference_attention_is_the_definition() -> None:
    q, k, v = np.random.default_rng(3).standard_normal((3, 6, 4))
    scores = np.exp([[float(q_i @ k_j) / 2 for k_j in k] for q_i in q])
    np.testing.assert_allclose(ladder.attention(q, k, v), scores / scores.sum(1, keepdims=True) @ v, atol=TOLERANCE)
    visible = scores * np.tri(6)
    expected = visible / visible.sum(1, keepdims=True) @ v
    np.testing.assert_allclose(ladder.attention(q, k, v, causal=True), expected, atol=TOLERANCE)
    assert (ladder.attention(q, k[:2], v[:2], causal=True)[:4] == 0).all()  # these queries stand before every key


def test_flash_attention_1_block_rule() -> None:
    rule = ladder.rung("flash_attention_1").block_rule
    assert rule(1024, 8) == (8, 32)
    assert rule(1000, 8) == (8, 32)  # rounded up
    assert rule(256, 64) == (1, 1)
    for fast_memory, head_dim in ((4096, 64), (65_536, 128), (1000, 8)):
        block_m, block_n = rule(fast_memory, head_dim)
        assert block_m * block_n <= fast_memory / 4 + head_dim  # S keeps to its share, up to the rounding


def test_merge_is_independent_of_order() -> None:
    random = np.random.default_rng(4)
    o, lse = random.standard_normal((5, 2, 3)), 50 * random.standard_normal((5, 2))
    merge = ladder.rung("split_kv").merge
    for left, right in zip(merge(o, lse), merge(o[::-1], lse[::-1]), strict=True):
        np.testing.assert_allclose(left, right, atol=TOLERANCE)


def test_traffic_falls_from_rung_to_rung() -> None:
    names = ["attention_two_pass", "attention_one_pass", "flash_attention_1", "flash_attention_2"]
    totals = [ladder.climb(name, size=64, head_dim=16).counts.total for name in names]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)
    causal = ladder.climb("flash_attention_2", size=64, head_dim=16, causal=True).counts.total
    assert causal < totals[-1]


@pytest.mark.parametrize("name", ladder.ORDER)
def test_climb_reports(name: str) -> None:
    report = ladder.climb(name, size=8, head_dim=4)
    assert report.counts == report.formula
    assert report.error < TOLERANCE
    assert "as the formula says" in str(report)
    assert report.title in ladder.rung(name).__doc__


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("module", ["tilewise.explain.ladder", "tilewise.explain.ladder.r09_flash_attention_2"])
def test_runs_as_a_program(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module(module, run_name="__main__")
    printed = capsys.readouterr().out
    assert "flash_attention_2" in printed
    assert printed.count("as the formula says") == (10 if module.endswith("ladder") else 1)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="rung"):
        ladder.rung("r01_matmul_naive")
    with pytest.raises(InputError, match="tile"):
        ladder.climb("matmul_tiled", tile=0)
    with pytest.raises(InputError, match="splits"):
        ladder.climb("split_kv", splits=-1)
    with pytest.raises(InputError, match="size"):
        ladder.climb("split_kv", size=0)


def test_slow_memory_counts_and_copies() -> None:
    memory = SlowMemory()
    x = memory.put(np.arange(12.0).reshape(3, 4))
    y = memory.empty(3, 4)
    row = x[1]
    row[:] = 0  # a copy: slow memory is unharmed
    assert x[1, 2] == 6.0
    y[0:2] = x[0:2]
    y[2, 3] = 1.0
    assert memory.counts == Counts(loads=4 + 1 + 8, stores=8 + 1)
    assert memory.counts.total == 22
    assert np.isnan(y.peek()[2, 0])
