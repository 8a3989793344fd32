"""What an engine, its parameters and a model's folder refuse: before any work, with a name, what came, what was
expected and a hint; the engine goes on. What else a folder's files must hold is in test_models.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import small
from tests.engine.small import VOCAB, engine_of
from tests.engine.whole import check_empty, check_whole
from tilewise.core.errors import InputError, TilewiseError, UnsupportedError
from tilewise.engine import LLM, Engine, EngineConfig, SamplingParams, memory

INDEX = "model.safetensors.index.json"


def refused(function: Callable[[], Any], kind: type[TilewiseError], words: str) -> None:
    """It raises an error of this kind, with these words and all parts."""
    with pytest.raises(kind, match=words) as raised:
        function()
    error = raised.value
    assert error.name
    assert error.expected
    assert error.hint
    assert len(str(error)) < 4000


# A model's folder


def configured(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: written("config.json", json.dumps(small.CONFIG | changes))(folder)


def written(file: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / file).write_text(text)

    return write


FOLDERS: dict[str, tuple[Callable[[Path], Any], type[TilewiseError], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), InputError, r"no config\.json in .*; expected one"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), InputError, r"no tokenizer\.json"),
    "config of text": (written("config.json", "no"), InputError, r"config\.json: got no JSON"),
    "architectures": (configured(architectures=[["x"]]), UnsupportedError, r"architectures: got \[\['x'\]\]"),
    "flag": (configured(attention_bias="no"), InputError, "attention_bias: got 'no'; expected true or false"),
    "norm": (configured(rms_norm_eps="1e-5"), InputError, "rms_norm_eps: got '1e-5'; expected a finite number"),
    "base": (configured(rope_theta=[1e4]), InputError, r"rope_theta: got \[10000\.0\]; expected a finite number"),
    "base of no number": (configured(rope_theta=float("nan")), InputError, "rope_theta: got nan"),
    "ends": (configured(eos_token_id=[[2]]), InputError, r"eos_token_id: got \[\[2\]\]; expected an id from 0"),
    "other ends": (written("generation_config.json", '{"eos_token_id": "2"}'), InputError, "eos_token_id: got '2'"),
    "window": (configured(max_window_layers="1"), InputError, "max_window_layers: got '1'; expected an integer"),
    "layers": (configured(layer_types=[[], []]), UnsupportedError, r"layer_types: got \[\[\], \[\]\]"),
    "stretched": (
        configured(rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "64"}),
        InputError,
        "original_max_position_embeddings: got '64'; expected a positive integer",
    ),
    "no map": (written(INDEX, "{}"), InputError, r"index\.json: .* expected an object with weight_map"),
    "index of text": (written(INDEX, "no"), InputError, r"index\.json: .* expected an object with weight_map"),
    "file that is no text": (written(INDEX, '{"weight_map": {"a": 3}}'), InputError, "got no 3; expected all files"),
    "templates": (
        written("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        InputError,
        "chat_template: got .* expected a text, or a list of objects with name and template",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_refused(name: str, tmp_path: Path) -> None:
    change, kind, words = FOLDERS[name]
    folder = small.save(tmp_path / "model")
    change(folder)
    refused(lambda: LLM(folder), kind, words)


OPTIONS: dict[str, tuple[dict[str, Any], type[TilewiseError], str]] = {
    "device": ({"device": "nonsense"}, InputError, "device: got 'nonsense'; expected a torch.device or its name"),
    "device that is not there": ({"device": "cuda:99"}, InputError, "device: got 'cuda:99'; expected one of"),
    "kind of device": ({"device": "meta"}, UnsupportedError, "device: got 'meta'; expected cpu or cuda"),
    "dtype": ({"dtype": "int8"}, UnsupportedError, "dtype: got 'int8'; expected auto, float32"),
    "option": ({"max_len": 4}, InputError, "LLM: got max_len=; expected max_model_len, memory"),
    "budget": ({"num_pages": 2, "max_model_len": 64}, InputError, "got 2 pages of 16 .* max_model_len to 32 or less"),
    "memory": ({"max_model_len": 10**12}, InputError, "KV cache: got .* pages of 16 tokens|num_pages: got"),
    "share": ({"memory": 1.5}, InputError, "memory: got 1.5; expected a number above 0, up to 1"),
    "encoding": ({"kv_encoding": "int3"}, InputError, "kv_encoding: got 'int3'; expected None, 'int8'"),
    "lag": ({"lag": -1}, InputError, "lag: got -1; expected an integer, at least 0"),
    "flag": ({"prefix_cache": "no"}, InputError, "prefix_cache: got 'no'; expected True or False"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_is_refused(name: str, tmp_path: Path) -> None:
    options, kind, words = OPTIONS[name]
    folder = small.save(tmp_path / "model")
    refused(lambda: LLM(folder, **options), kind, words)


def test_pages_that_the_device_has_no_memory_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(memory, "PagePool", full)
    words = "KV cache: got 8 pages of 16 tokens; expected as many as cpu has memory for"
    refused(lambda: engine_of(num_pages=8), InputError, words)


# Parameters


PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": -0.1}, "temperature: got -0.1; expected a number of at least 0"),
    "temperature of no number": ({"temperature": float("nan")}, "temperature: got nan"),
    "temperature beyond float32": (
        {"temperature": 1e300},
        "temperature: got 1e\\+300; expected .* up to 3.40282e\\+38",
    ),
    "temperature of text": ({"temperature": "hot"}, "temperature: got 'hot'"),
    "top_p": ({"top_p": 0.0}, "top_p: got 0.0; expected a number above 0, up to 1"),
    "top_k": ({"top_k": -1}, "top_k: got -1; expected an integer from 0"),
    "min_p": ({"min_p": 1.1}, "min_p: got 1.1; expected a number of at least 0, up to 1"),
    "seed": ({"seed": 2**63}, "seed: got 9223372036854775808"),
    "n": ({"n": 0}, "n: got 0; expected an integer from 1"),
    "many": ({"n": 129}, "n: got 129; expected an integer from 1 to 128"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens: got 0; expected an integer from 1"),
    "min above max": ({"max_tokens": 3, "min_tokens": 4}, "max_tokens: got 3; expected an integer from 4"),
    "stop": ({"stop": ["a", ""]}, r"stop: got \('a', ''\); expected up to 16 strings, none of them empty"),
    "stops": ({"stop": ["a"] * 17}, "stop: got .* expected up to 16 strings"),
    "stop of tokens": ({"stop": [3]}, r"stop: got \[3\]; expected a list of str"),
    "stop tokens of text": ({"stop_token_ids": ["a"]}, r"stop_token_ids: got \['a'\]; expected a list of int"),
    "none allowed": ({"allowed_token_ids": [3], "bad_token_ids": [3]}, r"allowed_token_ids: got \(3,\)"),
    "repetition": ({"repetition_penalty": 1e-40}, "repetition_penalty: got 1e-40; expected a number of at least 1e-30"),
    "presence": ({"presence_penalty": 1e39}, "presence_penalty: got 1e\\+39"),
    "frequency": ({"frequency_penalty": float("inf")}, "frequency_penalty: got inf"),
    "bias": ({"logit_bias": [3]}, "logit_bias: got list; expected numbers by token"),
    "bias of no number": ({"logit_bias": {3: float("nan")}}, "logit_bias: got nan"),
    "bias of no token": ({"logit_bias": {"a": 1.0}}, "logit_bias token: got 'a'"),
    "logprobs": ({"logprobs": 21}, "logprobs: got 21; expected an integer from 0 to 20"),
    "flag": ({"echo": 1}, "echo: got 1; expected True or False"),
}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_that_are_refused(name: str) -> None:
    params, words = PARAMS[name]
    refused(lambda: SamplingParams(**params), InputError, words)


# Requests


REQUESTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "number": (7, {}, "prompt: got int"),
    "prompt": ([1, 2.0], {}, "prompt: got list with 2.0; expected text or a list of tokens, integers"),
    "bytes": (b"ab", {}, "prompt: got bytes"),
    "tensor": (torch.tensor([1, 2]), {}, r"prompt: got Tensor; .* Hint: a tensor's are \.tolist\(\)"),
    "empty": ([], {}, "prompt: got no token; expected at least one"),
    "empty text": ("", {}, "prompt: got no token; expected at least one"),
    "long": ([1] * small.LENGTH, {}, f"prompt: got {small.LENGTH} tokens; expected fewer than max_model_len"),
    "outside": ([1, VOCAB], {}, f"prompt: got token {VOCAB}; expected 0 to {VOCAB - 1}"),
    "below": ([-1], {}, f"prompt: got token -1; expected 0 to {VOCAB - 1}"),
    "surrogate": ("\ud800", {}, "text: got '.ud800'"),
    "params": ([1], {"params": {"n": 2}}, r"params: got \{'n': 2\}; expected SamplingParams"),
    "stop token": ([1], {"params": SamplingParams(stop_token_ids=[VOCAB])}, f"stop_token_ids: got {VOCAB}; expected"),
    "bias": ([1], {"params": SamplingParams(logit_bias={VOCAB: 1.0})}, f"logit_bias: got {VOCAB}; expected"),
    "id": ([1], {"request_id": 5}, "request_id: got 5; expected text, or None"),
    "id that lives": ([1], {"request_id": "lives"}, "request_id: got 'lives'; expected one that no live request has"),
    "priority": ([1], {"priority": "high"}, "priority: got 'high'; expected an integer"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_is_refused_leaves_the_others(name: str) -> None:
    prompt, more, words = REQUESTS[name]
    engine = engine_of()
    engine.add([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4), request_id="lives")
    engine.step()
    refused(lambda: engine.add(prompt, **more), InputError, words)
    check_whole(engine)
    found = []
    while engine.has_unfinished:
        found = engine.step()
    assert [output.request_id for output in found] == ["lives"]
    assert len(found[0].outputs[0].token_ids) == 4
    check_empty(engine)


def test_an_id_to_abort_is_text() -> None:
    refused(lambda: engine_of().abort([1]), InputError, r"request_id: got \[1\]; expected text")  # type: ignore[arg-type]


def test_text_needs_a_tokenizer() -> None:
    engine = Engine(small.decoder(), config=EngineConfig(max_model_len=16, num_pages=1))
    refused(lambda: engine.add("text"), InputError, "prompt: got text; expected tokens")


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_no_more_tokens_are_listed_than_there_are(name: str) -> None:
    refused(lambda: SamplingParams(**{name: 9}).check_vocabulary(8), InputError, f"{name}: got 9; expected at most 8")


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return LLM(small.save(tmp_path / "model"), max_model_len=small.LENGTH, num_pages=16)


CALLS: dict[str, tuple[Callable[[LLM], Any], str]] = {
    "second prompt": (lambda llm: llm.generate([[1, 2], [VOCAB]]), f"prompt: got token {VOCAB}"),
    "number": (lambda llm: llm.generate(3), "prompts: got int; expected a list of prompts"),
    "mixed": (lambda llm: llm.generate([1, "a"]), "prompt: got list with 'a'"),
    "params": (lambda llm: llm.generate([[1], [2]], [SamplingParams()]), "params: got 1; expected 2"),
    "second params": (lambda llm: llm.generate([[1], [2]], [SamplingParams(), 3]), "params: got 3; expected Sampling"),
    "no template": (
        lambda llm: llm.chat([{"role": "user", "content": "a"}]),
        "got a tokenizer without a chat template",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_refused_leaves_nothing(name: str, llm: LLM) -> None:
    call, words = CALLS[name]
    refused(lambda: call(llm), InputError, words)
    check_empty(llm.engine)
    (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=3))
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("messages", ["text", {"role": "user", "content": "a"}, None, [3], [[]]])
def test_messages_that_are_refused(messages: Any, llm: LLM) -> None:
    llm.tokenizer._templates["default"] = "{{ messages[0]['content'] }}"
    refused(lambda: llm.chat(messages), InputError, "messages")
    check_empty(llm.engine)


def test_sizes_are_counts() -> None:
    for name in ("page_size", "max_batch_tokens", "max_running", "max_waiting", "num_pages", "max_model_len"):
        refused(lambda name=name: EngineConfig(**{name: 0}), InputError, f"{name}: got 0")  # type: ignore[misc]


def test_random_weights_answer_lists_of_tokens() -> None:
    llm = LLM("random:tiny", device="cpu", max_model_len=32, num_pages=8)
    (output,) = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
    refused(lambda: llm.generate("text"), InputError, "prompt: got text; expected tokens")
    refused(lambda: llm.chat([{"role": "user", "content": "text"}]), InputError, "tokenizer: got random weights")
    refused(lambda: LLM("random:nope"), InputError, "shape: got 'nope'; expected tiny")
