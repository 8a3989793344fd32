"""Layers with sliding windows hand their pages back, and answers stay the same."""

from __future__ import annotations

import pytest
import torch

from tests.engine.test_engine import answers, engine_of
from tests.engine.tiny import greedy, prompts
from tilewise.engine import SamplingParams
from tilewise.engine.groups import Group, groups_of

COUNT = 24


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None] * 5, [5]),
        ([8] * 5, [5]),
        ([None, 8] * 3, [3, 3]),
        ([8, 8, 8, 8, 8, None] * 4 + [8, 8], [4, 4, 4, 4, 4, 2, 4]),  # 22 and 4
        ([None, 8, 16], [1, 1, 1]),
    ],
)
def test_groups_have_layers_of_one_window_and_of_about_one_size(windows: list[int | None], sizes: list[int]) -> None:
    groups = groups_of(windows)
    assert sorted(map(len, (group.layers for group in groups))) == sorted(sizes)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)


def test_pages_of_a_group_are_bounded_by_its_window() -> None:
    assert Group((0,), None).pages(1000, 64, 16) == 63
    assert Group((0,), 100).pages(1000, 64, 16) == -(-(99 + 64) // 16) + 1
    assert Group((0,), 100).pages(50, 64, 16) == 4


def test_pages_in_front_of_the_window_are_handed_back() -> None:
    engine = engine_of("qwen2_windows", page_size=4, max_batch_tokens=16, prefix_cache=False)
    (prompt,) = prompts(60)
    name = engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=COUNT))
    used = []
    while engine.has_unfinished:
        (output, *_) = [*engine.step(), None]
        used.append(engine.pages.allocator.num_used)
        held = [sample.sequence for sample in engine.scheduler.running]
        for each in held:
            full, slides = each.parts
            assert full.dropped == 0
            assert len(full.pages) == -(-full.length // 4)
            assert len(slides.pages) - slides.dropped <= engine.pages.groups[1].pages(128, 1, 4) + 4
        assert engine.pages.violations() == []
    assert max(used) <= 21 + engine.pages.groups[1].pages(128, 16, 4)
    assert output.request_id == name
    assert output.outputs[0].token_ids == greedy("qwen2_windows", prompt, COUNT)


@pytest.mark.parametrize("name", ["mistral", "qwen2_windows"])
def test_prefixes_are_found_under_windows(name: str) -> None:
    engine = engine_of(name, page_size=4, max_batch_tokens=32)
    prefix, one, other = prompts(64, 5, 7)
    params = SamplingParams(temperature=0.0, max_tokens=COUNT)
    (first,) = answers(engine, [engine.add(prefix + one, params)])
    (second,) = answers(engine, [engine.add(prefix + other, params)])
    (third,) = answers(engine, [engine.add(prefix + one, params)])
    assert [output.cached_tokens for output in (first, second, third)] == [0, 64, 68]
    for output, rest in ((first, one), (second, other), (third, one)):
        assert output.outputs[0].token_ids == greedy(name, prefix + rest, COUNT)


@pytest.mark.parametrize("name", ["mistral", "qwen2_windows"])
def test_late_answers_of_one_request_begin_anew(name: str) -> None:
    """With two slots the later ones come when the first one's pages of the prompt are handed back."""
    engine = engine_of(name, page_size=4, max_running=2, prefix_cache=False, lag=1)
    (prompt,) = prompts(40)
    (output,) = answers(engine, [engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=COUNT, n=4))])
    assert [each.token_ids for each in output.outputs] == [greedy(name, prompt, COUNT)] * 4


def test_what_lies_in_a_page_that_was_handed_back_does_not_matter() -> None:
    """Another request takes the page and fills it with NaN; the first one's queries do not see it."""
    engine = engine_of("mistral", page_size=4, max_batch_tokens=16, prefix_cache=False)
    (prompt,) = prompts(60)
    engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=COUNT))
    found = []
    while engine.has_unfinished:
        found = engine.step()
        free = list(engine.pages.allocator._free)
        for layer in range(engine.pages.pool.num_layers):
            for pages in engine.pages.pool.pages(layer):
                assert isinstance(pages, torch.Tensor)
                pages[free] = torch.nan
    assert found[0].outputs[0].token_ids == greedy("mistral", prompt, COUNT)
