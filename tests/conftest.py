"""The tiers: which tests run in this process, which start another one, and which need a GPU; and how many of them.

`pytest` runs the cpu tier and the compile tier here and the interpret tier in processes of its own (test_tiers.py);
the gpu tier runs where PyTorch sees a GPU and is counted in the summary where it does not. Of products of parameters
pairwise-covering sets run (covering.py); `--full` runs them all, `--shard 1/4` a quarter of what would run, and
`--resume FILE` leaves out what has passed before with the same sources. Tests that are asked for by their parameters,
or by `-k`, all run. Of tests of kernels that have not changed since they passed, one in eight runs
(tools/kernel_tests.py), with `--all-kernels`, and `--full`, all.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.covering import count_pairs, factors_of, of_files
from tests.units import TESTS, compiled_rows, tier_of, unit_of
from tools import kernel_tests, resumed
from tools.families import ROOT
from tools.syntax import FOLDERS, sources_hash

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

# Compilation and the first call take seconds, so a deadline per example would only measure the machine.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("thorough", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

not_run = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tilewise")
    group.addoption("--full", action="store_true", help="whole products of parameters, not covering sets of pairs")
    group.addoption("--all-kernels", action="store_true", help="all tests of kernels that have not changed, too")
    group.addoption("--shard", metavar="K/N", help="of what would run the K-th of N parts, from 1")
    group.addoption("--resume", type=Path, metavar="FILE", help="note there what passes; leave out what has passed")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[not_run] = {}
    # With it new tensors hold NaN: a kernel shows that reads what nobody wrote.
    torch.set_deterministic_debug_mode("warn")
    # xdist would start the module with the most tests first; test_tiers.py has few tests and takes longest.
    config.option.loadscopereorder = False
    config.pluginmanager.register(_CountFromWorkers(config))
    noted = config.getoption("--resume")
    if noted is not None and not hasattr(config, "workerinput"):
        files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
        passed = resumed.Passed(noted.absolute(), sources_hash(files, ROOT))
        passed.leave_out()
        config.pluginmanager.register(resumed.Noting(passed))
    if hasattr(config, "workerinput"):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(config.workerinput["workercount"])))


def pytest_report_header() -> str:
    """Which tiers this process can collect."""
    if INTERPRETING:
        return "tiers: interpret only (TRITON_INTERPRET=1)"
    return "tiers: cpu, compile, gpu where there is one; test_tiers.py starts interpret in processes of its own"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """The interpreter patches Triton for a whole process: its tests and all others never share one."""
    if collection_path == TESTS or not collection_path.is_relative_to(TESTS) or collection_path.name == "__init__.py":
        return None
    belongs_to_interpreter = tier_of(collection_path / "_") == "interpret"
    return None if belongs_to_interpreter == INTERPRETING else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        tier = tier_of(item.path)
        if tier != "cpu" and item.get_closest_marker(tier) is None:
            item.add_marker(tier)
    if not torch.cuda.is_available():
        without = [item for item in items if item.get_closest_marker("gpu")]
        if without:
            config.hook.pytest_deselected(items=without)
            config.stash[not_run]["gpu"] = len(without)
            items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
    chosen_by_name = config.option.keyword or any("[" in name for name in config.args)
    if not (config.getoption("--full") or chosen_by_name):
        tests = [(str(item.path), _factors(item)) for item in items]
        chosen = of_files(tests)
        config.stash[not_run] |= {"covering": len(tests) - len(chosen), "pairs": count_pairs(tests)}
        assert count_pairs([tests[n] for n in chosen]) == config.stash[not_run]["pairs"]
        _keep(config, items, set(chosen))
    if not (config.getoption("--full") or config.getoption("--all-kernels") or chosen_by_name):
        compiled = [(unit_of(item.nodeid), compiled_rows(item)) for item in items]
        waiting = set(kernel_tests.waiting(compiled, _unchanged(compiled), kernel_tests.commits()))
        config.stash[not_run]["compile"] = len(waiting)
        _keep(config, items, set(range(len(items))) - waiting)
    if config.getoption("--resume") is not None:
        resumed.pytest_collection_modifyitems(config, items)
    if config.getoption("--shard"):
        part, parts = map(int, config.getoption("--shard").split("/"))
        _keep(config, items, set(range((part - 1) * len(items) // parts, part * len(items) // parts)))
    items.sort(key=lambda item: item.path.name != "test_tiers.py")


def _factors(item: pytest.Item) -> dict[str, str]:
    """The factors of a test; a value that has no text of its own counts as one that no other test has."""
    found = getattr(item, "callspec", None)
    function = item.nodeid.partition("[")[0].rpartition("::")[2]
    factors = factors_of(function, found.params if found else {})
    return {name: f"{function} {item.name}" if " at 0x" in value else value for name, value in factors.items()}


def _unchanged(tests: list[kernel_tests.Test]) -> set[str]:
    if not any(rows for _, rows in tests):
        return set()
    import triton

    return kernel_tests.unchanged(kernel_tests.read_table().get(triton.__version__, {}))


def _keep(config: pytest.Config, items: list[pytest.Item], chosen: set[int]) -> None:
    """Deselect all but these."""
    config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n not in chosen])
    items[:] = [item for n, item in enumerate(items) if n in chosen]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = session.config.stash[not_run]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash[not_run]
    if found.get("covering"):
        left_out, pairs = found["covering"], found["pairs"]
        terminalreporter.write_line(f"covering sets: {pairs:,} pairs, all met; {left_out:,} tests left for --full")
    if found.get("compile"):
        text = f"kernels that have not changed: {found['compile']} of their tests wait (--all-kernels)"
        terminalreporter.write_line(text)
    count = found.get("gpu", 0)
    if count:
        terminalreporter.write_line(f"gpu tier: {count} tests not run, PyTorch sees no GPU here", yellow=True)


class _CountFromWorkers:
    """With xdist only the workers collect; they hand their counts to the process that prints the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        counts = getattr(node, "workeroutput", {}).get("not_run", {})
        self.config.stash[not_run].update(counts)
