"""Continuous batching of transformers with attn_implementation="tilewise", against each prompt's own generate()."""

from __future__ import annotations

import inspect
import types
import warnings
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api

import tilewise as tw
from tests.adapters.dense import leaves
from tests.adapters.test_transformers import MODELS, make
from tilewise.adapters import transformers as adapter
from tilewise.adapters import transformers_continuous as continuous
from tilewise.core.errors import InputError, UnsupportedError

adapter.register()
NAMED_PAGE = "page_size" in inspect.signature(ContinuousBatchingConfig).parameters
NEW_TOKENS = 7


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers collects all garbage twice a batch, which takes half a second each in a process of many tests."""
    monkeypatch.setattr(continuous_api, "gc", types.SimpleNamespace(collect=lambda: 0), raising=False)


def prompts() -> list[list[int]]:
    """Of unlike lengths, one longer than a step takes; two begin alike, so that full pages are shared."""
    generator = torch.Generator().manual_seed(3)
    found: list[list[int]] = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in (3, 23, 9, 1, 14)]
    return [*found, found[1][:17]]


def alone(model: Any, texts: list[list[int]]) -> list[list[int]]:
    """What eager attention generates for one prompt after another."""
    model.set_attn_implementation("eager")
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return [model.generate(torch.tensor([text]), generation_config=config)[0, len(text) :].tolist() for text in texts]


def together(model: Any, texts: list[list[int]], **changes: Any) -> list[list[int]]:
    """What continuous batching generates, in steps of at most 12 tokens on pages of 4."""
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1)
    page = {"page_size" if NAMED_PAGE else "block_size": 4}
    batching = ContinuousBatchingConfig(**page, num_blocks=40, max_batch_tokens=12, **changes)
    found = model.generate_batch(
        texts, generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    assert all(output.error is None for output in found.values())
    ordered = sorted(found.values(), key=lambda output: int(output.request_id.rsplit("_", 1)[1]))
    return [output.generated_tokens for output in ordered]


class Seen:
    """Counts of `tilewise.attention`'s calls: packed, over pages in the cache itself, over pages of a copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packed = self.in_place = self.copied = 0
        self._cache: set[int] = set()
        self._layer, self._attention = continuous._layer, tw.attention
        monkeypatch.setattr(continuous, "_layer", self.layer)
        monkeypatch.setattr(tw, "attention", self.attention)

    def layer(self, cache: Any, module: Any) -> Any:
        found = self._layer(cache, module)
        assert found.rows is not None  # transformers has kept its private name for the views
        self._cache |= {x.untyped_storage().data_ptr() for x in found.rows}
        return found

    def attention(self, q: Any, k: Any, v: Any, **given: Any) -> Any:
        if isinstance(given["layout"], tw.Packed):
            self.packed += 1
        elif k.untyped_storage().data_ptr() in self._cache:
            self.in_place += 1
        else:
            self.copied += 1
        return self._attention(q, k, v, **given)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_generates_what_each_prompt_does_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = make(name), prompts()
    expected = alone(model, texts)
    model.set_attn_implementation("tilewise")
    seen = Seen(monkeypatch)
    assert together(model, texts) == expected
    assert seen.packed > 0
    assert seen.in_place > 5
    assert (seen.copied > 0) == (name != "Llama")  # only rings are copied, for steps of several tokens of a request


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_rows_that_only_pad_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    begin = ModelRunner.__init__

    def padding(runner: Any, *args: Any, **kwargs: Any) -> None:
        begin(runner, *args, **kwargs)
        runner.pad_inputs = True  # as CUDA graphs and torch.compile have it

    model, texts = make(name), prompts()
    expected = alone(model, texts)
    model.set_attn_implementation("tilewise")
    monkeypatch.setattr(ModelRunner, "__init__", padding)
    padded: list[bool] = []
    attend = continuous.attend

    def recorded(module: Any, query: Any, key: Any, value: Any, step: Any, *args: Any, **given: Any) -> Any:
        padded.append(int(step["cu_seq_lens_q"][-1]) < query.shape[2])
        return attend(module, query, key, value, step, *args, **given)

    monkeypatch.setattr(continuous, "attend", recorded)
    assert together(model, texts, q_padding_interval_size=5, kv_padding_interval_size=16) == expected
    assert any(padded)


def test_both_names_run_and_others_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = make("Llama"), prompts()[:2]
    expected = alone(model, texts)
    seen = Seen(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers is to forget the prefix
        model.set_attn_implementation("paged|tilewise")
    assert together(model, texts) == expected
    calls = seen.in_place
    assert calls > 0
    model.set_attn_implementation("eager")
    assert together(model, texts) == expected
    assert seen.in_place == calls


def test_a_registered_name_is_admitted_and_an_unknown_one_is_not() -> None:
    from transformers.modeling_utils import AttentionInterface

    model, texts = make("Llama"), prompts()[:1]
    adapter.register("tilewise_too")
    model.set_attn_implementation("tilewise_too")
    assert len(together(model, texts)[0]) == NEW_TOKENS
    AttentionInterface.register("somebody", adapter.attention_forward)
    model.set_attn_implementation("somebody")
    with pytest.raises(ValueError, match="somebody"):
        together(model, texts)


class Full:
    """A cache of one full layer, as transformers had it before 5.18: token t of a request in row `places[t]`."""

    def __init__(self, heads: int = 2, dim: int = 8) -> None:
        self.key_cache, self.value_cache = ([torch.full((20, heads, dim), torch.nan)] for _ in "kv")
        self.layer_index_to_group_indices, self.sliding_windows = {3: (0, 0)}, {3: 1}

    def update(self, key: Any, value: Any, layer_idx: int, read_index: Any, write_index: Any) -> Any:
        assert not read_index[0].numel()
        for pages, new in ((self.key_cache, key), (self.value_cache, value)):
            pages[0][write_index[0]] = new[0].transpose(0, 1)
        return key, value


def layer() -> torch.nn.Module:
    found = torch.nn.Module()
    found.layer_idx = 3  # type: ignore[assignment]
    return found


def step(cache: Any, reads: list[int], writes: list[int], cu_q: list[int], cu_k: list[int]) -> dict[str, Any]:
    return {
        "cache": cache,
        "read_index": [torch.tensor(reads, dtype=torch.int64)],
        "write_index": [torch.tensor(writes, dtype=torch.int64)],
        "cu_seq_lens_q": torch.tensor(cu_q, dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor(cu_k, dtype=torch.int32),
        "max_seqlen_q": 2,
    }


def test_requests_read_their_rows_in_their_order() -> None:
    q, k, v = (x.detach() for x in leaves((1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8)))
    cache = Full()
    old = torch.randn(2, 2, 2, 8, generator=torch.Generator().manual_seed(1))
    cache.key_cache[0][[9, 4]], cache.value_cache[0][[9, 4]] = old
    # the first request has two old tokens and two new ones, the second three new ones; the last row pads
    given = step(cache, [9, 4, 15, 2, 7, 6, 11, 0, 0], [15, 2, 7, 6, 11, 19], [0, 2, 5, 5], [0, 4, 7, 7])
    found, weights = adapter.attention_forward(layer(), q, k, v, scaling=0.5, softcap=3.0, **given)
    assert weights is None
    assert found.shape == (1, 6, 4, 8)
    for new, past in ((slice(0, 2), old), (slice(2, 5), old[:, :0])):
        keys, values = (torch.cat((p, x[0, :, new].transpose(0, 1)))[None] for p, x in zip(past, (k, v), strict=True))
        expected = tw.attention(
            q[:, :, new].transpose(1, 2), keys, values, mask=tw.causal, score=tw.softcap(3.0), scale=0.5
        )
        torch.testing.assert_close(found[:, new], expected)
    assert found[0, 5].abs().max() == 0


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("cache: got SimpleNamespace", {"cache": types.SimpleNamespace()}),
        ("block_table", {"block_table": torch.zeros(1, 1, 4, dtype=torch.int32)}),
        ("attention_mask", {"attention_mask": torch.zeros(1, 1, 1, 1)}),
        ("position_bias", {"position_bias": torch.zeros(1, 4, 1, 1)}),
        ("sliding_window", {"windows": {3: 4}}),
    ],
)
def test_what_is_not_served_is_named(name: str, given: dict[str, Any]) -> None:
    q, k, v = (x.detach() for x in leaves((1, 4, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8)))
    cache = Full()
    cache.sliding_windows = given.pop("windows", cache.sliding_windows)
    with pytest.raises(UnsupportedError, match=f"{name}.* Hint: "):
        adapter.attention_forward(layer(), q, k, v, **{**step(cache, [5], [5], [0, 1], [0, 1]), **given})


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k", "read_index"])
def test_indices_beyond_32_bits_are_refused(name: str) -> None:
    q, k, v = (x.detach() for x in leaves((1, 4, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8)))
    given = step(Full(), [5], [5], [0, 1], [0, 1])
    wide = torch.tensor([2**32 + 5]) if name == "read_index" else torch.tensor([0, 2**32 + 1])
    given[name] = [wide] if name == "read_index" else wide
    with pytest.raises(InputError, match=f"^{name}: got {int(wide[-1])} in"):
        adapter.attention_forward(layer(), q, k, v, **given)
