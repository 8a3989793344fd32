"""Tile configurations for short sequences, put in place of those for GPUs."""

from __future__ import annotations

import pytest
import torch

from tilewise.formula.formula import as_mask, as_score
from tilewise.formula.walk import symbols
from tilewise.ops import triton_launch
from tilewise.ops.attention import triton_plans
from tilewise.ops.attention.configs import Config
from tilewise.testing.case import Case
from tilewise.testing.inputs import make_inputs

TILES = {
    "wide": {
        "forward": Config(64, 32, 4, 1),
        "keys": Config(32, 64, 4, 1),
        "queries": Config(64, 32, 4, 1),
    },
    "narrow": {
        "forward": Config(32, 16, 4, 1),
        "keys": Config(16, 32, 4, 1),
        "queries": Config(16, 16, 4, 1),
    },
    "tall": {
        "forward": Config(16, 64, 4, 1),
        "keys": Config(64, 16, 4, 1),
        "queries": Config(16, 64, 4, 1),
    },
    "described": {  # through tensor descriptors
        "forward": Config(32, 16, 4, 1, tma=True),
        "keys": Config(16, 32, 4, 1, tma=True),
        "queries": Config(16, 16, 4, 1, tma=True),
    },
}


def use_tiles(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let every kernel run with the tiles of `TILES[name]`; no plan is remembered from other tiles."""
    patch.setattr(triton_plans, "config_of", lambda kernel, call: TILES[name][kernel])
    patch.setattr(triton_launch, "remember", False)


def single(case: Case) -> Case:
    """The case with one batch element, if its formula does not read b: half the time, the same paths."""
    inputs = make_inputs(case, torch.float32)
    roots = [as_mask(inputs.mask.formula).expr] if inputs.mask is not None else []
    roots += [as_score(inputs.score.formula).expr] if inputs.score is not None else []
    if case.packed is not None or any("b" in symbols(root) for root in roots):
        return case
    return case.with_(batch=1)
