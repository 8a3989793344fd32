"""GGUF files: read, dequantised, and converted into folders that transformers reads."""

from __future__ import annotations

import contextlib
import doctest
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import gguf_files
from tilewise.core.errors import InputError, TilewiseError, UnsupportedError
from tilewise.engine import gguf
from tilewise.engine.gguf import GGUFFile, convert, dequantize
from tilewise.engine.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
IDS = torch.arange(40)[None] * 7 % 300


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "model.gguf")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


# Reading


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    numbers = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60000), 3: ("h", -30000), 5: ("i", -70000), 10: ("Q", 1 << 40)}
    numbers |= {11: ("q", -(1 << 40)), 12: ("d", 0.1)}
    scalars = b"".join(
        gguf_files.string(f"n{kind}") + struct.pack(f"<I{form}", kind, number)
        for kind, (form, number) in numbers.items()
    )
    nested = gguf_files.string("nested") + struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQ2H", 2, 2, 1, 2)
    nested += struct.pack("<IQ", 8, 1) + gguf_files.string("é")
    head = b"GGUF" + struct.pack("<IQQ", 2, 0, len(numbers) + 1)
    (tmp_path / "a.gguf").write_bytes(head + scalars + nested)
    read = GGUFFile(tmp_path / "a.gguf").fields
    assert read == {**{f"n{kind}": number for kind, (_, number) in numbers.items()}, "nested": [[1, 2], ["é"]]}


def test_tensors_are_where_the_alignment_says(tmp_path: Path) -> None:
    made = gguf_files.tensors(gguf_files.llama())
    (tmp_path / "a.gguf").write_bytes(gguf_files.gguf({"a": 1, "general.alignment": 32}, made))
    source = GGUFFile(tmp_path / "a.gguf")
    assert source.tensors.keys() == made.keys()
    for name, (weight, kind) in made.items():
        assert (source.tensors[name].shape, source.tensors[name].type) == (weight.shape, kind)
        assert np.array_equal(source.read(name), weight)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_numbers_are_those_of_the_formula(kind: str) -> None:
    """One number after another, as ggml-quants.c does it."""
    weight = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    data = gguf_files.encode(weight, kind)
    expected: list[float] = []
    if kind in ("F32", "F16"):
        expected = [x for (x,) in struct.iter_unpack("<f" if kind == "F32" else "<e", data)]
    elif kind == "BF16":
        expected = torch.from_numpy(weight).bfloat16().double().flatten().tolist()
    size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}.get(kind, len(data) + 1)
    for at in range(0, len(data) - size + 1, size):
        block = data[at : at + size]
        (d,) = struct.unpack("<e", block[:2])
        if kind == "Q8_0":
            expected += [d * code for (code,) in struct.iter_unpack("<b", block[2:])]
            continue
        codes = [byte & 15 for byte in block[-16:]] + [byte >> 4 for byte in block[-16:]]
        m = struct.unpack("<e", block[2:4])[0] if kind == "Q4_1" else -8 * d
        expected += [d * code + m for code in codes]
    made = dequantize(data, kind)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, np.array(expected), rtol=3e-7, atol=2e-7)
    error = np.abs(made - weight.reshape(-1)).max()
    assert error < {"F32": 1e-9, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 3e-2}.get(kind, 0.6)


def test_a_file_that_ends_early_says_so(tmp_path: Path, file: Path) -> None:
    whole = file.read_bytes()
    for kept in (0, 3, 7, 20, 30, 100, 1000, 5000, len(whole) // 2, len(whole) - 40):
        (tmp_path / "a.gguf").write_bytes(whole[:kept])
        with pytest.raises(InputError, match="GGUF file"):
            GGUFFile(tmp_path / "a.gguf")


@pytest.mark.parametrize("name", ["none.gguf", ""])
def test_a_file_that_is_none_says_so(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="GGUF file"):
        GGUFFile(tmp_path / name)


def test_bytes_of_any_kind_are_no_crash(tmp_path: Path, file: Path) -> None:
    whole, draw = bytearray(file.read_bytes()), np.random.default_rng(1)
    for _ in range(60):
        broken = bytearray(whole)
        for at in draw.integers(0, 9000, size=4):
            broken[at] = draw.integers(256)
        (tmp_path / "a.gguf").write_bytes(broken)
        with contextlib.suppress(TilewiseError):
            GGUFFile(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(gguf_files.gguf({"general.alignment": 0}, {}))
    with pytest.raises(InputError, match="alignment"):
        GGUFFile(tmp_path / "a.gguf")


@pytest.mark.parametrize(("version", "kind", "said"), [(1, "F32", "version 1"), (3, "Q4_K", "Q4_K")])
def test_what_is_not_read_is_named(tmp_path: Path, version: int, kind: str, said: str) -> None:
    made = {"a": (np.zeros((2, 64), np.float32), kind)}
    (tmp_path / "a.gguf").write_bytes(gguf_files.gguf({}, made, version))
    with pytest.raises(UnsupportedError, match=said):
        GGUFFile(tmp_path / "a.gguf")


# Converting


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_has_the_logits_of_the_one_it_was(tmp_path: Path, tied: bool) -> None:
    model = gguf_files.llama(tied)
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_files.gguf(gguf_files.fields(), gguf_files.tensors(model)))
    seen: list[tuple[int, int]] = []
    out = convert(file, tmp_path / "made" / "folder", dtype="float32", progress=lambda *counts: seen.append(counts))
    made = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert made.dtype == torch.float32
    assert made.config.tie_word_embeddings == tied
    torch.testing.assert_close(logits(made), logits(model), rtol=0, atol=0)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0
    assert {path.name for path in out.parent.iterdir()} == {"folder"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_weights_are_rounded_once(tmp_path: Path, kind: str, dtype: str) -> None:
    """Those of the file, dequantised and cast by PyTorch."""
    model, file = gguf_files.llama(), tmp_path / "model.gguf"
    file.write_bytes(gguf_files.gguf(gguf_files.fields(), gguf_files.tensors(model, kind)))
    made = transformers.AutoModelForCausalLM.from_pretrained(convert(file, tmp_path / "out", dtype=dtype))
    source = GGUFFile(file)
    target = getattr(torch, dtype)
    assert made.dtype == target
    for theirs, ours in [
        ("model.embed_tokens", "token_embd"),
        ("model.layers.1.mlp.down_proj", "blk.1.ffn_down"),
        ("model.layers.0.self_attn.v_proj", "blk.0.attn_v"),
        ("model.norm", "output_norm"),
    ]:
        expected = torch.from_numpy(source.read(f"{ours}.weight")).to(target)
        assert torch.equal(made.state_dict()[f"{theirs}.weight"], expected)


def test_configuration_and_tokenizer_come_along(tmp_path: Path, file: Path) -> None:
    out = convert(file, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    expected = gguf_files.llama().config.to_dict()
    for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_key_value_heads", "rms_norm_eps"):
        assert config[key] == expected[key]
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 5000.0
    assert (config["bos_token_id"], config["eos_token_id"], config["dtype"]) == (1, 2, "bfloat16")
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2
    made, theirs = Tokenizer.read(out), transformers.AutoTokenizer.from_pretrained(out)
    text = "the other 1234 dogs, Grüße!<|end|>\n\n  one"
    assert made.encode(text) == theirs.encode(text) == gguf_files.tokenizer().encode(text).ids
    assert made.decode(made.encode(text), skip_special=False) == text
    assert (made.eos_ids, made.pad_id, made.special_ids) == ((2,), 2, {0, 1, 2})
    chat = [{"role": "user", "content": "Hello"}]
    assert made.apply_chat_template(chat) == theirs.apply_chat_template(chat, tokenize=False)
    assert made.apply_chat_template(chat) == "<|start|>user: Hello<|end|>"


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
def test_pre_tokenizers_are_those_of_the_models(tmp_path: Path, pre: str) -> None:
    changed = gguf_files.tokenizer_fields(gguf_files.tokenizer("gpt-2"), pre) | {"tokenizer.ggml.add_bos_token": None}
    made = Tokenizer.read(convert(gguf_files.write(tmp_path / "m.gguf", gguf_files.fields(**changed)), tmp_path / "o"))
    pieces = [piece for piece, _ in made.backend.pre_tokenizer.pre_tokenize_str("It'S 1234 ok\n\n")]
    assert (
        pieces
        == {
            "smollm": ["It", "'", "S", "Ġ", "1", "2", "3", "4", "Ġok", "ĊĊ"],
            "gpt-2": ["It", "'", "S", "Ġ1234", "Ġok", "ĊĊ"],
            "llama-bpe": ["It", "'S", "Ġ", "123", "4", "Ġok", "ĊĊ"],
        }[pre]
    )
    assert (made.encode("the")[0] == 1) == (pre == "llama-bpe")  # llama.cpp's default for it


def test_first_tokens_and_turns_that_end(tmp_path: Path) -> None:
    changed = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 0}
    made = Tokenizer.read(convert(gguf_files.write(tmp_path / "m.gguf", gguf_files.fields(**changed)), tmp_path / "o"))
    assert made.encode("the")[0] == 1
    assert made.encode("the", special=False)[0] != 1
    assert made.eos_ids == (2, 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"general.architecture": "qwen2"}, "qwen2"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.type = linear"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.model = llama"),
        ({"tokenizer.ggml.pre": "new"}, r"tokenizer\.ggml\.pre = new"),
    ],
)
def test_what_would_change_the_results_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    file = gguf_files.write(tmp_path / "m.gguf", gguf_files.fields(**changed))
    with pytest.raises(UnsupportedError, match=said):
        convert(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_tensor_that_no_llama_has_is_refused(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "m.gguf", rope_freqs__weight=(np.ones(8, np.float32), "F32"))
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        convert(file, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("token_embd", (np.ones((299, 64), np.float32), "F32"), "299 rows; expected one for each of 300 tokens"),
        ("blk__1__ffn_up", None, r"no blk\.1\.ffn_up\.weight"),
        ("blk__1__ffn_up", (np.ones((64, 96), np.float32), "F32"), r"the shape \(64, 96\); expected \(96, 64\)"),
        ("blk__1__ffn_up", (np.full((96, 64), np.nan, np.float32), "F32"), "numbers from nan"),
        ("blk__1__ffn_up", (np.full((96, 64), 1e5, np.float32), "F32"), "numbers from 100000.0"),
    ],
)
def test_a_wrong_tensor_is_refused(tmp_path: Path, name: str, tensor: Any, said: str) -> None:
    file = gguf_files.write(tmp_path / "m.gguf", **{f"{name}__weight": tensor})
    with pytest.raises(InputError, match=said):
        convert(file, tmp_path / "out", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_that_are_infinite_are_refused(tmp_path: Path, dtype: str) -> None:
    weight = np.ones((96, 64), np.float32)
    weight[3, 5] = -np.inf
    file = gguf_files.write(tmp_path / "m.gguf", blk__1__ffn_up__weight=(weight, "F32"))
    with pytest.raises(InputError, match="numbers from -inf"):
        convert(file, tmp_path / "out", dtype=dtype)


@pytest.mark.parametrize(
    "key", ["llama.block_count", "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.merges"]
)
def test_missing_metadata_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(InputError, match=key.replace(".", r"\.")):
        convert(gguf_files.write(tmp_path / "m.gguf", gguf_files.fields(**{key: None})), tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokenizer.ggml.bos_token_id": 300}, "IndexError"),
        ({"tokenizer.ggml.merges": ["never there"]}, "out of vocabulary"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "zip"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count = 0"),
    ],
)
def test_wrong_metadata_is_named(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        convert(gguf_files.write(tmp_path / "m.gguf", gguf_files.fields(**changed)), tmp_path / "out")


def test_a_folder_that_holds_something_is_kept(tmp_path: Path, file: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(InputError, match="out_folder"):
        convert(file, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes"]
    (tmp_path / "out" / "notes").unlink()
    assert (convert(file, tmp_path / "out") / "config.json").exists()


def test_another_dtype_is_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(InputError, match="dtype"):
        convert(file, tmp_path / "out", dtype="int8")


def test_examples_run() -> None:
    done = doctest.testmod(gguf)
    assert done.attempted
    assert not done.failed
