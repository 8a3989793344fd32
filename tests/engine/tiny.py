"""Small random models of transformers, as checkpoints and as decoders."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tilewise.engine.models.config import ModelConfig
from tilewise.engine.models.decoder import Decoder
from tilewise.engine.models.weights import load_weights

VOCAB = 199
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 256, "head_dim": 24,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "short_factor": [1.0 + n / 9 for n in range(12)],
    "long_factor": [1.0 + n for n in range(12)], "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_rope3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama_longrope": ("Llama", {"rope_parameters": LONGROPE}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2_windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
}


def random_model(name: str, seed: int = 0) -> Any:
    """One of transformers, in float32, with weights that make its answers vary."""
    kind, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(-0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.15, generator=generator)
    return model


@functools.cache
def pair(name: str) -> tuple[Any, Decoder]:
    """(a model of transformers, the decoder that is loaded from what it saves)."""
    model = random_model(name)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model, decoder_of(Path(folder))


def decoder_of(folder: Path) -> Decoder:
    """The decoder of a checkpoint, in float32."""
    decoder = Decoder(ModelConfig.read(folder), dtype=torch.float32)
    load_weights(decoder, folder)
    return decoder


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def greedy(name: str, prompt: list[int], count: int) -> list[int]:
    """What transformers' generate gives after a prompt."""
    return list(_greedy(name, tuple(prompt), count))


@functools.cache
def _greedy(name: str, prompt: tuple[int, ...], count: int) -> list[int]:
    model, tokens = pair(name)[0], torch.tensor([prompt])
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False)
    return found[0, len(prompt) :].tolist()
