"""The tiers: which tests run in this process, which start another one, and which need a GPU.

`pytest` runs the cpu tier and the compile tier here and the interpret tier in processes of its own (test_tiers.py);
the gpu tier runs where PyTorch sees a GPU and is counted in the summary where it does not.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

# Compilation and the first call take seconds, so a deadline per example would only measure the machine.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("thorough", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

not_run = pytest.StashKey[dict[str, int]]()


def _tier(path: Path) -> str:
    """The tier a test file belongs to: the name of its folder where that is a tier, else cpu."""
    first = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    return first if first in ("interpret", "compile", "gpu") else "cpu"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[not_run] = {}
    # With it new tensors hold NaN: a kernel shows that reads what nobody wrote.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # xdist would start the module with the most tests first; test_tiers.py has few tests and takes longest.
    config.option.loadscopereorder = False
    config.pluginmanager.register(_CountFromWorkers(config))
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
    belongs_to_interpreter = _tier(collection_path / "_") == "interpret"
    return None if belongs_to_interpreter == INTERPRETING else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        tier = _tier(item.path)
        if tier != "cpu" and item.get_closest_marker(tier) is None:
            item.add_marker(tier)
    if not torch.cuda.is_available():
        without = [item for item in items if item.get_closest_marker("gpu")]
        if without:
            config.hook.pytest_deselected(items=without)
            config.stash[not_run]["gpu"] = len(without)
            items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
    items.sort(key=lambda item: item.path.name != "test_tiers.py")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = session.config.stash[not_run]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash[not_run].get("gpu", 0)
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
