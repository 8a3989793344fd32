"""An engine whose model computes nothing: what the host does of a step, and which samples it chooses."""

from __future__ import annotations

from typing import Any

import torch

from tests.engine.small import decoder
from tilewise.engine import Engine, EngineConfig
from tilewise.engine.pages import Growth
from tilewise.engine.request import Sample
from tilewise.engine.runner import Given, Step
from tilewise.engine.scheduler import Work


def host_engine(**options: Any) -> Engine:
    """Every token that it samples is 7."""
    engine = Engine(decoder(), config=EngineConfig(**{"max_model_len": 64, "prefix_cache": False} | options))

    def launch(work: list[Work], growth: Growth) -> Step:
        for group, slot, index, page in growth.changes:
            engine.pages.tables[group, slot, index] = page
        tokens = torch.full((sum(each.samples for each in work),), 7)
        return Step(work, Given(tokens, None, None, None), {}, None)

    def seat(samples: list[Sample]) -> None:
        pass

    engine.runner.launch = launch  # type: ignore[method-assign]
    engine.runner.seat = seat  # type: ignore[method-assign, assignment]
    return engine
