"""A real model: SmolLM2-135M-Instruct, fetched from PyPI on first use, answers what transformers answers."""

from __future__ import annotations

import pytest
import torch
import transformers

from tilewise.engine import LLM, SamplingParams
from tilewise.engine.smollm2 import folder

COUNT = 32
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a small dog who",
    "1, 2, 3, 4, 5, 6, 7,",
)


@pytest.fixture(scope="module")
def greedy() -> list[list[int]]:
    """Tokens of transformers' generate, all prompts at once, padded in front."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder(), padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32).eval()
    tokenizer.pad_token = tokenizer.eos_token
    asked = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    found = model.generate(**asked, max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False)
    return found[:, -COUNT:].tolist()


def test_greedy_tokens_equal_those_of_transformers(greedy: list[list[int]]) -> None:
    """Prompts in chunks, beside each other; its end tokens do not end an answer, as in `greedy`."""
    llm = LLM("smollm2", device="cpu", max_model_len=128, num_pages=64, max_batch_tokens=16)
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, min_tokens=COUNT)
    outputs = llm.generate(list(PROMPTS), params)
    assert [output.outputs[0].token_ids for output in outputs] == greedy
    assert outputs[0].outputs[0].text.startswith(" Paris")
    (chat,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0.0))
    assert "Paris" in chat.outputs[0].text
