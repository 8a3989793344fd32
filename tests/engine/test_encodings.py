"""Quantized keys and values in the engine: tokens are those of a sequence that is computed at once, whatever shares the
batch, the pages and the steps, since each token and head is encoded by itself.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from tests.engine import small
from tests.engine.test_engine import COUNT, OPTIONS, answers, engine_of, few_pages
from tests.engine.tiny import pair, prompts
from tests.engine.whole import attend_of
from tilewise.engine import LLM, SamplingParams
from tilewise.quant import decode, encode

# what one code more or less changes of a log-probability at most: a number between two codes may get either, since sums
# in float32 are taken in another order
STEPS = {"int8": 1e-3, "fp8": 5e-3, "int4": 2e-2}
ASKED = prompts(5, 28, 1, 13, 28)
ASKED[4][:16] = ASKED[1][:16]
PARAMS = SamplingParams(temperature=0.0, max_tokens=COUNT, logprobs=0)


@functools.cache
@torch.no_grad()
def at_once(name: str, encoding: str | None, number: int) -> tuple[list[int], list[float]]:
    """(greedy tokens, their log-probabilities) after a prompt, all of it computed anew for each token."""
    decoder, tokens = pair(name)[1], list(ASKED[number])
    values = []

    def stored(x: torch.Tensor) -> torch.Tensor:
        return x if encoding is None else decode(encode(x, encoding))

    for _ in range(COUNT):
        hidden = decoder.hidden(torch.tensor(tokens), attend_of(decoder, len(tokens), stored=stored))
        value, token = decoder.logits(hidden[-1:])[0].log_softmax(-1).max(-1)
        tokens.append(int(token))
        values.append(float(value))
    return tokens[len(ASKED[number]) :], values


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["llama", "qwen2_windows", "qwen3"])
@pytest.mark.parametrize("encoding", STEPS)
def test_greedy_tokens_are_those_of_encoded_keys_and_values(
    encoding: str, name: str, options: str, order: tuple[int, ...]
) -> None:
    engine = engine_of(name, kv_encoding=encoding, **OPTIONS[options] | few_pages(name, options))
    ids = {number: engine.add(ASKED[number], PARAMS) for number in order}
    for number, output in enumerate(answers(engine, [ids[number] for number in range(len(ASKED))])):
        tokens, values = at_once(name, encoding, number)
        assert output.outputs[0].token_ids == tokens
        found = [each.logprob for each in output.outputs[0].logprobs or []]
        assert found == pytest.approx(values, abs=STEPS[encoding])
    if name != "qwen2_windows":  # windows need few pages
        assert (engine.scheduler.preemptions > 0) == options.startswith("few_pages")


@pytest.mark.parametrize("encoding", STEPS)
def test_codes_are_not_the_numbers_themselves(encoding: str) -> None:
    """The test above would see keys and values that are not encoded."""
    exact, found = at_once("llama", None, 1)[1], at_once("llama", encoding, 1)[1]
    assert max(abs(x - y) for x, y in zip(exact, found, strict=True)) > 4 * STEPS[encoding]


@pytest.mark.parametrize(("encoding", "number_bytes", "scale_bytes"), [(None, 4, 0), ("int8", 1, 4), ("int4", 0.5, 4)])
def test_why_counts_codes_and_scales(
    encoding: str | None, number_bytes: float, scale_bytes: int, tmp_path: Path
) -> None:
    folder = small.save(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    tokens = 16 * 4096
    heads = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    size = tokens * heads * (config["head_dim"] * number_bytes + scale_bytes)
    llm = LLM(folder, kv_encoding=encoding, num_pages=4096, max_model_len=48)
    assert llm.engine.pages.pool.nbytes == size
    wanted = f"{tokens:,} tokens in 4,096 pages of 16, {size / 2**20:,.0f} MiB, {encoding or 'float32'};"
    assert wanted in llm.why()
