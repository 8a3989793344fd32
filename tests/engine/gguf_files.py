"""Small GGUF files, written by hand: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30, "Q4_K": 12}
SIZES = {
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "llama.rope.dimension_count": 16,
}
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(entry: Any) -> bytes:
    """A metadata value with its type."""
    if isinstance(entry, bool):
        return struct.pack("<I?", 7, entry)
    if isinstance(entry, int):
        return struct.pack("<II", 4, entry)
    if isinstance(entry, float):
        return struct.pack("<If", 6, entry)
    if isinstance(entry, str):
        return struct.pack("<I", 8) + string(entry)
    kind = 8 if isinstance(entry[0], str) else 5
    body = b"".join(string(one) if kind == 8 else struct.pack("<i", one) for one in entry)
    return struct.pack("<IIQ", 9, kind, len(entry)) + body


def encode(weight: np.ndarray, kind: str) -> bytes:
    """The bytes of a tensor; quantized ones by the range of each block."""
    if kind == "F32":
        return weight.astype("<f4").tobytes()
    if kind == "F16":
        return weight.astype("<f2").tobytes()
    if kind == "BF16":
        return torch.from_numpy(weight).bfloat16().view(torch.int16).numpy().tobytes()
    data = b""
    for block in weight.reshape(-1, 32):
        if kind == "Q8_0":
            scale = np.float16(np.abs(block).max() / 127)
            data += scale.tobytes() + np.clip(np.round(block / scale), -127, 127).astype(np.int8).tobytes()
            continue
        least = np.float16(block.min())
        scale = np.float16((block.max() - block.min()) / 15) if kind == "Q4_1" else np.float16(np.abs(block).max() / 8)
        codes = np.round((block - least) / scale if kind == "Q4_1" else block / scale + 8)
        codes = np.clip(codes, 0, 15).astype(np.uint8)
        data += scale.tobytes() + (least.tobytes() if kind == "Q4_1" else b"")
        data += (codes[:16] | codes[16:] << 4).tobytes()
    return data


def gguf(fields: dict[str, Any], tensors: dict[str, tuple[np.ndarray, str]], version: int = 3) -> bytes:
    """A whole file."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    head += b"".join(string(key) + value(entry) for key, entry in fields.items())
    data = b""
    for name, (weight, kind) in tensors.items():
        shape = weight.shape[::-1]
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TYPES[kind], len(data))
        data += encode(weight, kind if kind != "Q4_K" else "F32")
        data += bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32) + data


def tokenizer(pre: str = "smollm") -> Any:
    """A byte-level BPE as a GGUF file can hold it; its tokens fill a vocabulary of 300."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|none|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        ["the quick brown fox jumps over 1234 lazy dogs, then the other one. Grüße"] * 4, trainer
    )
    assert backend.get_vocab_size() == 300
    return backend


def tokenizer_fields(backend: Any, pre: str = "smollm") -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def fields(**changed: Any) -> dict[str, Any]:
    """The metadata of a small Llama; entries that are None are left out, `__` stands for a dot."""
    found = {"general.architecture": "llama", **SIZES, **tokenizer_fields(tokenizer())}
    found |= {key.replace("__", "."): entry for key, entry in changed.items()}
    return {key: entry for key, entry in found.items() if entry is not None}


def llama(tied: bool = True) -> Any:
    """A small LlamaForCausalLM of transformers with random weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def tensors(model: Any, kind: str = "F32") -> dict[str, tuple[np.ndarray, str]]:
    """A model's weights as llama.cpp's converter writes them: norms in F32, queries and keys by its order of rows."""
    names = {
        "embed_tokens": "token_embd",
        "lm_head": "output",
        "norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    found = {}
    for name, weight in model.state_dict().items():
        parts = name.split(".")
        if parts[0] == "lm_head" and model.config.tie_word_embeddings:
            continue
        array = weight.numpy()
        if parts[-2] in ("q_proj", "k_proj"):
            heads = array.shape[0] // 16
            array = array.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(array.shape)
        block = f"blk.{parts[2]}." if "layers" in parts else ""
        found[f"{block}{names[parts[-2]]}.weight"] = (np.ascontiguousarray(array), kind if array.ndim > 1 else "F32")
    return found


def write(path: Path, changed_fields: dict[str, Any] | None = None, **changed: tuple[np.ndarray, str] | None) -> Path:
    """A small model's file, with other tensors by name (`__` stands for a dot), or without those that are None."""
    found = {**tensors(llama()), **{name.replace("__", "."): entry for name, entry in changed.items()}}
    path.write_bytes(gguf(changed_fields or fields(), {name: entry for name, entry in found.items() if entry}))
    return path
