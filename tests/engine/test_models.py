"""Decoders against transformers: logits, and what a checkpoint must have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny import MODELS, SIZES, decoder_of, pair, prompts, random_model
from tests.engine.whole import attend_of
from tilewise.core.errors import InputError, UnsupportedError
from tilewise.engine.models.config import ModelConfig

LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str) -> None:
    model, decoder = pair(name)
    (prompt,) = prompts(60)
    tokens = torch.tensor(prompt)
    with torch.no_grad():
        got = decoder.logits(decoder.hidden(tokens, attend_of(decoder, len(prompt))))
        want = model(tokens[None]).logits[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def config_of(**changes: Any) -> dict[str, Any]:
    found = {name: value for name, value in (LLAMA | changes).items() if value != "absent"}
    return found


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, UnsupportedError, "GPT2LMHeadModel"),
    "rope_type": ({"rope_scaling": {"rope_type": "spiral"}}, UnsupportedError, "spiral"),
    "rope_factor": ({"rope_scaling": {"rope_type": "yarn"}}, InputError, "factor, which yarn needs"),
    "rope_list": ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, InputError, "long_factor, which"),
    "rope_key": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, UnsupportedError, "twist"),
    "nested_rope": ({"rope_parameters": {"full_attention": {}}}, UnsupportedError, "full_attention"),
    "key": ({"attn_logit_softcapping": 30.0}, UnsupportedError, "attn_logit_softcapping"),
    "activation": ({"hidden_act": "gelu"}, UnsupportedError, "gelu"),
    "missing_size": ({"num_hidden_layers": "absent"}, InputError, "num_hidden_layers"),
    "size": ({"vocab_size": -3}, InputError, "-3"),
    "heads": ({"num_key_value_heads": 3}, InputError, "divisor of 4"),
    "layer_types": ({"layer_types": ["linear_attention"] * 2}, UnsupportedError, "linear_attention"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_config_may_not_say(name: str) -> None:
    changes, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        ModelConfig.of(config_of(**changes))


def test_end_tokens_of_both_files_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(eos_token_id=2)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert ModelConfig.read(tmp_path).eos_token_ids == (2, 7)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    random_model("llama").save_pretrained(tmp_path)
    return tmp_path


def test_no_folder_and_no_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected the folder of a checkpoint, or 'smollm2'"):
        ModelConfig.read(tmp_path / "none")
    with pytest.raises(InputError, match=r"no config\.json"):
        ModelConfig.read(tmp_path)


def change(folder: Path, change_of: Any) -> None:
    """Save the checkpoint's tensors anew, changed."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change_of(tensors)
    save_file(tensors, file)


NORM = "model.layers.1.input_layernorm.weight"


def test_a_missing_tensor_is_named(saved: Path) -> None:
    change(saved, lambda tensors: tensors.pop(NORM))
    with pytest.raises(InputError, match=f"got no {NORM}"):
        decoder_of(saved)


def test_a_tensor_of_another_shape_is_named(saved: Path) -> None:
    change(saved, lambda tensors: tensors.update({NORM: torch.ones(3)}))
    with pytest.raises(InputError, match=rf"model\.safetensors {NORM}: got torch\.float32 \(3,\); expected .*\(64,\)"):
        decoder_of(saved)


def test_a_tensor_that_is_no_parameter_is_named(saved: Path) -> None:
    change(saved, lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.ones(96, 64)}))
    with pytest.raises(InputError, match="no tensor of this name"):
        decoder_of(saved)


def test_a_tensor_in_two_files_is_named(saved: Path) -> None:
    save_file({NORM: torch.ones(64)}, saved / "more.safetensors")
    with pytest.raises(InputError, match="one file"):
        decoder_of(saved)


def test_a_broken_file_is_named(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"model\.safetensors: .*whole safetensors file"):
        decoder_of(saved)


def test_a_missing_file_of_an_index_is_named(saved: Path) -> None:
    index = {"weight_map": {NORM: "model-00002-of-00002.safetensors"}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"no model-00002-of-00002\.safetensors"):
        decoder_of(saved)
