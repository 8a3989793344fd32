"""A decoder that is small, with weights that make its answers vary; no transformers."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.engine.backends import byte_fallback
from tilewise.engine import Engine, EngineConfig
from tilewise.engine.models.config import ModelConfig
from tilewise.engine.models.decoder import Decoder
from tilewise.engine.tokenizer import Tokenizer

VOCAB = 300
LENGTH = 48
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}  # fmt: skip
CONFIGS = {
    "full": CONFIG,
    "windows": CONFIG
    | {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


@functools.cache
def decoder(name: str = "full") -> Decoder:
    """In float32 on the CPU."""
    found = Decoder(ModelConfig.of(CONFIGS[name]), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight in found.named().values():
        if weight.ndim == 1:
            weight.uniform_(-0.5, 1.5, generator=generator)
        else:
            weight.normal_(0.0, 0.25, generator=generator)
    return found


@functools.cache
def tokenizer() -> Tokenizer:
    """Most of its tokens are single bytes; the decoder has a few more."""
    return Tokenizer(byte_fallback())


def engine_of(name: str = "full", **options: Any) -> Engine:
    """With pages for one sequence and a few tokens more, unless `options` say another number."""
    size = options.get("page_size", EngineConfig.page_size)
    pages = len(set(decoder(name).config.windows)) * -(-LENGTH // size) + 2
    return Engine(decoder(name), tokenizer(), EngineConfig(**{"max_model_len": LENGTH, "num_pages": pages} | options))


def save(folder: Path) -> Path:
    """The decoder as a checkpoint, with its tokenizer."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: weight.contiguous() for name, weight in decoder().named().items()}, folder / "model.safetensors")
    byte_fallback().save(str(folder / "tokenizer.json"))
    return folder
