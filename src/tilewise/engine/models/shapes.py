"""Random weights in the shapes of published models: to measure and to look at the engine without a download."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.core.errors import InputError, shown
from tilewise.engine.models.config import ModelConfig
from tilewise.engine.models.decoder import Decoder


def _llama(**sizes: Any) -> dict[str, Any]:
    """A `config.json`, as transformers writes it."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return config | ids | {"attention_bias": False} | sizes


# Sizes of "tiny" are our own, the others those of the models' config.json at huggingface.co: HuggingFaceTB/
# SmolLM2-135M-Instruct, Qwen/Qwen3-0.6B, meta-llama/Meta-Llama-3-8B. No token ends an answer.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _llama(
        hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=4096, max_position_embeddings=4096, rope_theta=1e4, tie_word_embeddings=True,
    ),
    "smollm2-135m": _llama(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, vocab_size=49152, max_position_embeddings=8192, rope_theta=1e5, tie_word_embeddings=True,
    ),
    "qwen3-0.6b": _llama(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", rms_norm_eps=1e-6, hidden_size=1024,
        intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        vocab_size=151936, max_position_embeddings=40960, rope_theta=1e6, tie_word_embeddings=True,
    ),
    "llama-3-8b": _llama(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, max_position_embeddings=8192, rope_theta=5e5, tie_word_embeddings=False,
    ),
}  # fmt: skip


def shape_config(shape: str) -> ModelConfig:
    """The config of a shape; InputError for another name."""
    if shape not in SHAPES:
        hint = "a checkpoint's folder has no random: before it"
        raise InputError("shape", got=shown(shape), expected=", ".join(SHAPES), hint=hint)
    return ModelConfig.of(SHAPES[shape])


def random_decoder(shape: str, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Decoder:
    """A decoder with random weights, which keep the size of what passes through them: its answers vary.

    Args:
        shape: a name in `SHAPES`.
        dtype: of the weights.
        device: where they are made.
        seed: the same seed gives the same weights on the same device.

    Returns:
        The decoder. Norms are 1, biases 0.

    Raises:
        InputError: another name.
    """
    decoder = Decoder(shape_config(shape), dtype=dtype, device=device)
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for name, weight in decoder.named().items():
        if weight.ndim == 2:
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
        else:
            weight.fill_(0.0 if name.endswith(".bias") else 1.0)
    return decoder
