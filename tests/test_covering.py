"""Covering sets: fewer tests, no pair of values less."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import conftest
from tests.covering import Factors, count_pairs, covering, factors_of, of_files, pairs
from tilewise.testing.properties import Setting
from tools.resumed import LEFT_OUT

PRODUCT = [
    {"test": test, "impl": impl, "dtype": dtype, "case": str(case)}
    for test, impl, dtype, case in itertools.product("ab", ("cpu", "triton", "hopper"), ("16", "32"), range(10))
]


def met(tests: list[Factors]) -> set[object]:
    return {pair for test in tests for pair in pairs(test)}


def test_every_pair_of_a_product_meets_in_a_fourth_of_it() -> None:
    chosen = covering(PRODUCT)
    assert met([PRODUCT[n] for n in chosen]) == met(PRODUCT)
    assert 30 <= len(chosen) <= len(PRODUCT) // 3, "each implementation meets each case, and little else is repeated"


def test_without_one_of_them_a_pair_is_missing() -> None:
    """None is chosen for nothing."""
    small = [test for test in PRODUCT if test["case"] in "012"]
    chosen = covering(small)
    needed = [n for n in chosen if met([small[other] for other in chosen if other != n]) != met(small)]
    assert len(needed) >= len(chosen) - 2


def test_what_is_no_product_runs_whole() -> None:
    rows = [{"test": "a", "old": str(n), "new": str(n + 1)} for n in range(20)]
    alone = [{"test": "b"}, {"test": "c"}]
    two = [{"test": "d", "x": x, "y": y} for x, y in itertools.product("12", "345")]
    assert covering([*rows, *alone, *two]) == list(range(28))


def test_files_are_covered_one_by_one() -> None:
    tests = [(file, test) for file in ("one", "two") for test in PRODUCT]
    chosen = of_files(tests)
    assert count_pairs([tests[n] for n in chosen]) == count_pairs(tests) == 2 * len(met(PRODUCT))
    assert len([n for n in chosen if n < len(PRODUCT)]) * 2 == len(chosen)


def test_a_setting_is_an_implementation_and_a_dtype() -> None:
    found = factors_of("test_x", {"setting": Setting("triton", torch.float16), "case": "causal"})
    assert found == {"test": "test_x", "impl": "'triton'", "dtype": "torch.float16", "case": "'causal'"}


def test_lambdas_are_told_apart() -> None:
    found = [factors_of("test_x", {"f": f})["f"] for f in (lambda x: x, lambda x: x + 1, len)]
    assert len(set(found)) == 3
    assert not any(" at 0x" in text for text in found)


TESTS = """
import pytest

@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(2))
def test_product(a, b, c):
    assert (a, b, c) != {broken}
"""


@pytest.fixture
def ran(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs pytest over a product of 24 with this project's conftest, and gives what it says."""
    monkeypatch.setenv(LEFT_OUT, "")  # which pytest sets where it resumes
    hashed = functools.cache(conftest.sources_hash)  # seconds, of files that no run changes
    monkeypatch.setattr(conftest, "sources_hash", lambda files, root: hashed(tuple(files), root))

    def run(*options: str, broken: str = "()") -> str:
        path = tmp_path / "test_some.py"
        path.write_text(TESTS.replace("{broken}", broken))
        # without the plugin that collects all garbage of this whole process at the end of each run
        plugins = ["-p", "tests.conftest", *(f"-pno:{name}" for name in ("cacheprovider", "unraisableexception"))]
        sys.modules.pop("test_some", None)  # of the last run
        pytest.main(
            [str(path), "--import-mode", "importlib", "-c", "/dev/null", "--rootdir", str(tmp_path), *plugins, *options]
        )
        return capsys.readouterr().out

    return run


def test_pytest_runs_covering_sets_and_full_ones(ran: Callable[..., str]) -> None:
    few = ran()
    assert "12 passed, 12 deselected" in few
    assert "all met; 12 tests left for --full" in few
    assert "24 passed" in ran("--full")
    assert "24 passed" in ran("-k", "product")


def test_pytest_goes_on_where_it_was_cut_short(ran: Callable[..., str], tmp_path: Path) -> None:
    noted = ("--full", "--resume", str(tmp_path / "passed.jsonl"))
    assert "1 failed, 23 passed" in ran(*noted, broken="(1, 1, 1)")
    assert "1 failed, 23 deselected" in ran(*noted, broken="(1, 1, 1)")


def test_shards_are_the_whole(ran: Callable[..., str]) -> None:
    said = [ran("--full", "--shard", f"{k}/5") for k in range(1, 6)]
    assert sum(int(re.findall(r"(\d+) passed", text)[0]) for text in said) == 24
