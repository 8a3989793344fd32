"""What a checkpoint's `config.json` says of a decoder, read strictly: what would change a number and is not known is
an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.core.real import is_finite
from tilewise.frequencies import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Scaling,
    YarnScaling,
)

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# keys that say nothing of how an answer is computed
_IGNORED = frozenset(
    {
        "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "auto_map", "bos_token_id",
        "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "initializer_range", "is_decoder",
        "is_llama_config", "label2id", "model_type", "original_max_position_embeddings", "output_attentions",
        "output_hidden_states", "pad_token_id",
        "pretraining_tp", "problem_type", "return_dict", "rope_interleaved", "rope_parameters", "rope_scaling",
        "rope_theta", "torch_dtype", "transformers.js_config", "transformers_version", "unsloth_fixed",
        "unsloth_version", "use_cache",
    }
)  # fmt: skip
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of Llama's kind.

    Attributes:
        architecture: as the checkpoint names it, `LlamaForCausalLM` for example.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_heads: query heads.
        num_heads_kv: key and value heads.
        head_dim: columns of a head.
        vocab_size: rows of the embedding.
        norm_eps: added to the mean square by every RMSNorm.
        max_length: positions that the model was made for, `max_position_embeddings`.
        rope_base: base of the rotary embedding, `rope_theta`.
        scaling: how its frequencies are changed for longer contexts; None where they are not.
        qkv_bias: whether query, key and value projections have a bias.
        o_bias: whether the output projection has one.
        mlp_bias: whether the projections of the MLP have one.
        qk_norm: whether queries and keys of a head go through an RMSNorm before they are rotated.
        tied: whether the output projection is the embedding.
        windows: for each layer, how many keys a query sees, itself included; None is all.
        eos_token_ids: tokens that end an answer.
        dtype: of the checkpoint's tensors; None where the file does not say.
        sinks: whether each query head has a logit that joins its softmax and has no value, as gpt-oss. No architecture
            of `ARCHITECTURES` has it.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    max_length: int
    rope_base: float
    scaling: Scaling | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype | None
    sinks: bool = False

    @staticmethod
    def read(folder: str | Path) -> ModelConfig:
        """The config of a checkpoint's folder; end tokens of `generation_config.json` count, too.

        Raises:
            InputError: no folder, no file, or values that contradict each other.
            UnsupportedError: an architecture, a rope type or a key that is not known.
        """
        folder = Path(folder)
        if not folder.is_dir():
            expected = "the folder of a checkpoint, or 'smollm2', a small model that is fetched"
            hint = "a checkpoint has config.json, *.safetensors and tokenizer.json"
            raise InputError("model", got=shown(str(folder)), expected=expected, hint=hint)
        given = _json(folder / "config.json", "a checkpoint's folder has one")
        generation = folder / "generation_config.json"
        ends = _ends(given) + (_ends(_json(generation, "")) if generation.exists() else ())
        return ModelConfig.of(given, tuple(dict.fromkeys(ends)))

    @staticmethod
    def of(given: dict[str, Any], eos_token_ids: tuple[int, ...] | None = None) -> ModelConfig:
        """The same of a dictionary, as `config.json` has it."""
        keys = _Keys(given)
        architecture = _architecture(given)
        family = ARCHITECTURES[architecture]
        if keys.take("hidden_act", "silu") != "silu":
            raise UnsupportedError(
                "config.json hidden_act", got=shown(given["hidden_act"]), expected="'silu'", hint="no other is offered"
            )
        layers = keys.count("num_hidden_layers")
        heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
        heads_kv = keys.count("num_key_value_heads", heads)
        head_dim = keys.count("head_dim", max(1, hidden // heads))
        if heads % heads_kv:
            hint = "each key head serves as many query heads"
            raise InputError(
                "config.json num_key_value_heads", got=heads_kv, expected=f"a divisor of {heads}", hint=hint
            )
        bias = keys.flag("attention_bias")
        max_length = keys.count("max_position_embeddings")
        base, scaling = _rope(given, head_dim, max_length)
        found = ModelConfig(
            architecture=architecture,
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=keys.count("intermediate_size"),
            num_heads=heads,
            num_heads_kv=heads_kv,
            head_dim=head_dim,
            vocab_size=keys.count("vocab_size"),
            norm_eps=_number("config.json rms_norm_eps", keys.take("rms_norm_eps", 1e-6)),
            max_length=max_length,
            rope_base=base,
            scaling=scaling,
            qkv_bias=family == "qwen2" or bias,
            o_bias=family != "qwen2" and bias,
            mlp_bias=keys.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            tied=keys.flag("tie_word_embeddings"),
            windows=_windows(keys, family, layers),
            eos_token_ids=_ends(given) if eos_token_ids is None else eos_token_ids,
            dtype=_dtype(given),
        )
        keys.end()
        return found


class _Keys:
    """A file's keys, each taken once; what is left at the end is not known."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = dict(given)

    def take(self, name: str, default: Any = None) -> Any:
        value = self._given.pop(name, default)
        return default if value is None else value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default)
        if type(value) is not int or value < 1:
            raise InputError(f"config.json {name}", got=shown(value), expected="a positive integer", hint="a size")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if type(value) is not bool:
            raise InputError(f"config.json {name}", got=shown(value), expected="true or false", hint="a choice")
        return value

    def end(self) -> None:
        unknown = sorted(self._given.keys() - _IGNORED)
        if unknown:
            raise UnsupportedError(
                "config.json",
                got=f"keys {', '.join(unknown)}",
                expected="keys whose meaning is known",
                hint="they may change what the model computes; remove those that do not",
            )


def _json(path: Path, hint: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("model", got=f"no {path.name} in {path.parent}", expected="one", hint=hint) from None
    except ValueError as error:
        raise InputError(path.name, got=f"no JSON: {error}", expected="an object", hint="fetch it again") from None
    if not isinstance(found, dict):
        raise InputError(path.name, got=type(found).__name__, expected="an object", hint="fetch it again")
    return found


def _architecture(given: dict[str, Any]) -> str:
    named = given.get("architectures")
    if isinstance(named, list) and len(named) == 1 and str(named[0]) in ARCHITECTURES:
        return str(named[0])
    if not named:  # files of older tools name the model's type alone
        for architecture, family in ARCHITECTURES.items():
            if given.get("model_type") == family:
                return architecture
    raise UnsupportedError(
        "config.json architectures",
        got=shown(named or given.get("model_type")),
        expected=" or ".join(ARCHITECTURES),
        hint="tilewise.adapters.transformers runs attention of other models",
    )


def _ends(given: dict[str, Any]) -> tuple[int, ...]:
    ends = given.get("eos_token_id")
    found = () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    if not all(type(end) is int and end >= 0 for end in found):
        raise InputError("eos_token_id", got=shown(ends), expected="an id from 0, or a list of them", hint="of tokens")
    return found


def _number(name: str, value: Any) -> float:
    if not is_finite(value) or value < 0:
        raise InputError(name, got=shown(value), expected="a finite number of at least 0", hint="as a number, not text")
    return float(value)


def _dtype(given: dict[str, Any]) -> torch.dtype | None:
    named = given.get("dtype", given.get("torch_dtype"))
    return None if named is None else _DTYPES.get(str(named))


def _windows(keys: _Keys, family: str, layers: int) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types` where a file has them, else by the older keys."""
    window = keys.take("sliding_window")
    used = keys.flag("use_sliding_window", family == "mistral")
    from_layer = keys.take("max_window_layers", 0)
    if type(from_layer) is not int:
        hint = "layers before it see all keys"
        raise InputError("config.json max_window_layers", got=shown(from_layer), expected="an integer", hint=hint)
    types = keys.take("layer_types")
    if types is None:
        slides = [used and window is not None and (family == "mistral" or n >= from_layer) for n in range(layers)]
    else:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(types, list) or len(types) != layers or any(str(each) not in known for each in types):
            expected = f"{layers} of {' and '.join(known)}"
            raise UnsupportedError(
                "config.json layer_types", got=shown(types), expected=expected, hint="other kinds are not offered"
            )
        slides = [known[each] for each in types]
    if any(slides) and (type(window) is not int or window < 1):
        raise InputError(
            "config.json sliding_window", got=shown(window), expected="a positive integer", hint="count keys"
        )
    return tuple(window if each else None for each in slides)


def _rope(given: dict[str, Any], head_dim: int, max_length: int) -> tuple[float, Scaling | None]:
    """(base, scaling): from `rope_parameters`, as transformers 5 writes it, or from `rope_theta` and `rope_scaling`."""
    said = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(said, dict) or any(isinstance(value, dict) for value in said.values()):
        raise UnsupportedError(
            "config.json rope_parameters", got=shown(said), expected="numbers by name", hint="one set for all layers"
        )
    keys = dict(said)
    theta = keys.pop("rope_theta", given.get("rope_theta", 10000.0))
    kind = keys.pop("rope_type", keys.pop("type", "default"))
    keys.pop("type", None)
    if keys.pop("partial_rotary_factor", given.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedError("config.json partial_rotary_factor", got="less than 1", expected="1", hint="whole heads")
    original = keys.pop("original_max_position_embeddings", given.get("original_max_position_embeddings"))
    if original is not None and (type(original) is not int or original < 1):
        name, hint = "config.json original_max_position_embeddings", "positions before the model was stretched"
        raise InputError(name, got=shown(original), expected="a positive integer", hint=hint)

    def needed(name: str) -> Any:
        if keys.get(name) is None:
            expected, hint = f"{name}, which {kind} needs", "the model's own file has it"
            raise InputError("config.json rope_parameters", got=shown(said), expected=expected, hint=hint)
        return keys.pop(name)

    scaling: Scaling | None
    if kind == "default":
        scaling = None
    elif kind == "linear":
        scaling = LinearScaling(needed("factor"))
    elif kind == "dynamic":
        scaling = DynamicScaling(needed("factor"), original or max_length)
    elif kind == "llama3":
        low, high = needed("low_freq_factor"), needed("high_freq_factor")
        scaling = Llama3Scaling(needed("factor"), low, high, original or max_length)
    elif kind == "yarn":
        betas = {name: keys.pop(name) for name in ("beta_fast", "beta_slow") if keys.get(name) is not None}
        factor = needed("factor")
        scaling = YarnScaling(
            factor, original or max_length, **betas, attention_factor=keys.pop("attention_factor", None)
        )
    elif kind == "longrope":
        original = original or max_length
        factor = keys.pop("factor", None) or max_length / original
        short, long = needed("short_factor"), needed("long_factor")
        scaling = LongRopeScaling(factor, short, long, original, keys.pop("attention_factor", None))
    else:
        raise UnsupportedError(
            "config.json rope_type",
            got=shown(kind),
            expected="default, linear, dynamic, llama3, longrope or yarn",
            hint="another one changes every position",
        )
    unknown = sorted(name for name, value in keys.items() if value is not None)
    if unknown:
        hint = "they may change every position"
        raise UnsupportedError(f"config.json {kind} rope", got=f"keys {', '.join(unknown)}", expected="none", hint=hint)
    return _number("config.json rope_theta", theta), scaling
