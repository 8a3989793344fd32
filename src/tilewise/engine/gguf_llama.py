"""What a GGUF file says about a Llama model: its configuration, and Hugging Face's names for its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewise.core.errors import InputError, UnsupportedError

# Keys whose meaning is known. Others in "llama." could change what the model computes.
_KNOWN = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "vocab_size",
    }
)


def llama_config(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The entries of config.json.

    Args:
        fields: the file's metadata.
        shapes: the shape of each tensor by llama.cpp's name.

    Raises:
        UnsupportedError: another architecture, or a key or tensor that would change the results.
        InputError: a key or tensor that is missing, or a shape that does not fit.
    """
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedError(
            "architecture",
            got=str(architecture),
            expected="llama",
            hint="take the model's original Hugging Face folder",
        )
    entries = {key.removeprefix("llama."): value for key, value in fields.items() if key.startswith("llama.")}
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(entries.get(key), list):
            raise _unsupported({key: "a number for each layer"})
    heads = _positive(entries, "attention.head_count")
    head_dim = entries.get("attention.key_length", _positive(entries, "embedding_length") // heads)
    unknown = {key: entries[key] for key in entries.keys() - _KNOWN}
    if entries.get("rope.scaling.type", "none") != "none":
        unknown["rope.scaling.type"] = entries["rope.scaling.type"]
    for key in ("rope.dimension_count", "attention.value_length"):
        if entries.get(key, head_dim) != head_dim:
            unknown[key] = entries[key]
    if unknown:
        raise _unsupported(unknown)
    tokens = fields.get("tokenizer.ggml.tokens", ())
    rows = shapes.get("token_embd.weight", (len(tokens),))[0]  # a model may have more rows than tokens
    if rows < len(tokens):
        raise InputError(
            "tensor token_embd.weight",
            got=f"{rows} rows",
            expected=f"one for each of {len(tokens)} tokens",
            hint="convert the model anew",
        )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": _positive(entries, "embedding_length"),
        "intermediate_size": _positive(entries, "feed_forward_length"),
        "num_hidden_layers": _positive(entries, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _positive({"attention.head_count_kv": heads, **entries}, "attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _positive(entries, "context_length"),
        "rms_norm_eps": _decimal(_positive(entries, "attention.layer_norm_rms_epsilon", float)),
        "rope_theta": (theta := _decimal(entries.get("rope.freq_base", 10000.0))),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    _check_shapes(config, shapes)
    return config


def llama_tensors(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Hugging Face's name and the shape of each tensor, by llama.cpp's name."""
    hidden, middle, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (queries, hidden)),
        "attn_k": ("self_attn.k_proj", (keys, hidden)),
        "attn_v": ("self_attn.v_proj", (keys, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, queries)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
        "ffn_gate": ("mlp.gate_proj", (middle, hidden)),
        "ffn_up": ("mlp.up_proj", (middle, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, middle)),
    }
    table = (config["vocab_size"], hidden)
    names: dict[str, tuple[str, tuple[int, ...]]] = {"token_embd.weight": ("model.embed_tokens.weight", table)}
    for number in range(config["num_hidden_layers"]):
        for name, (target, shape) in layer.items():
            names[f"blk.{number}.{name}.weight"] = (f"model.layers.{number}.{target}.weight", shape)
    names["output_norm.weight"] = ("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        names["output.weight"] = ("lm_head.weight", table)
    return names


def permuted_heads(
    name: str, weight: np.ndarray[Any, np.dtype[np.float32]], config: Mapping[str, Any]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The weight with Hugging Face's order of rows.

    llama.cpp rotates neighbouring channels (2c, 2c + 1) of queries and keys, Hugging Face channels c and
    c + head_dim / 2: a head's rows come apart into even and odd ones.
    """
    if not name.endswith(("attn_q.weight", "attn_k.weight")):
        return weight
    rows, columns = weight.shape
    halves = weight.reshape(-1, config["head_dim"] // 2, 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(rows, columns))


def _check_shapes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    expected = {name: shape for name, (_, shape) in llama_tensors(config).items()}
    if more := sorted(shapes.keys() - expected.keys()):
        raise UnsupportedError(
            "GGUF tensors",
            got=", ".join(more),
            expected="those of a Llama model without biases, experts and frequencies of its own (rope_freqs)",
            hint="take the model's original Hugging Face folder",
        )
    if missing := sorted(expected.keys() - shapes.keys()):
        raise InputError(
            "GGUF tensors", got=f"no {', '.join(missing)}", expected="all tensors", hint="download the file anew"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise InputError(
                f"tensor {name}",
                got=f"the shape {shapes[name]}",
                expected=f"{shape}, by the file's metadata",
                hint="download the file anew",
            )


def _unsupported(found: Mapping[str, Any]) -> UnsupportedError:
    return UnsupportedError(
        "GGUF metadata",
        got=", ".join(f"llama.{key} = {value}" for key, value in sorted(found.items())),
        expected="a Llama model with one kind of layer, whole heads rotated and no RoPE scaling",
        hint="take the model's original Hugging Face folder",
    )


def _positive(entries: Mapping[str, Any], key: str, kind: type[int] | type[float] = int) -> Any:
    """A number of the metadata that must be there."""
    found: Any = entries.get(key)
    if not isinstance(found, kind) or not found > 0:
        raise InputError(
            "GGUF metadata",
            got=f"no llama.{key}" if found is None else f"llama.{key} = {found}",
            expected="all numbers of the model, above 0",
            hint="convert the model anew",
        )
    return found


def _decimal(number: float) -> float:
    """The shortest decimal of a float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(number)))
