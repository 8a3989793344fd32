"""Models out of llama.cpp's GGUF files: read, dequantised and written as a Hugging Face folder."""

from __future__ import annotations

import json
import math
import mmap
import os
import pathlib
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.engine.gguf_llama import llama_config, llama_tensors, permuted_heads
from tilewise.engine.gguf_tokenizer import write_tokenizer

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# The name of each tensor type, elements of a block and its bytes.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
_OTHERS = {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"}
# By dtype: safetensors' name, bytes and the largest number.
_DTYPES = {
    "bfloat16": ("BF16", 2, 2.0**128 - 2.0**120),
    "float16": ("F16", 2, 65504.0),
    "float32": ("F32", 4, 2.0**128 - 2.0**104),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in a file.

    Attributes:
        name: in llama.cpp's words, such as `blk.0.attn_q.weight`.
        shape: as PyTorch writes it, the last dimension contiguous (GGUF writes it first).
        type: `F32`, `F16`, `BF16`, `Q8_0`, `Q4_0` or `Q4_1`.
        start, stop: the bytes, from the file's beginning.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    stop: int


class GGUFFile:
    """A GGUF file (versions 2 and 3), mapped into memory: its metadata, and tensors on request.

    Args:
        path: the file.

    Attributes:
        fields: metadata by key, arrays as lists.
        tensors: `TensorInfo` by name.

    Raises:
        InputError: no GGUF file, or one that ends early.
        UnsupportedError: another version, or a tensor type that is not read here.

    Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        try:
            with open(self.path, "rb") as handle:
                self._bytes = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as wrong:  # ValueError: an empty file
            raise self._bad(str(wrong)) from wrong
        self._at = 0
        if self._take(4) != b"GGUF":
            raise self._bad(f"its first bytes are {self._bytes[:4]!r}")
        version = self._number("I")
        if version not in (2, 3):
            raise UnsupportedError(
                "GGUF file", got=f"version {version}", expected="2 or 3", hint="convert the file with llama.cpp"
            )
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        try:
            self.fields: dict[str, Any] = {self._string(): self._value(self._number("I")) for _ in range(num_fields)}
            found = [self._info() for _ in range(num_tensors)]
        except (UnicodeDecodeError, RecursionError) as wrong:
            raise self._bad(str(wrong)) from wrong
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._bad(f"general.alignment is {shown(alignment)}")
        data = -(-self._at // alignment) * alignment
        self.tensors = {info.name: replace(info, start=info.start + data, stop=info.stop + data) for info in found}
        end = max((info.stop for info in self.tensors.values()), default=0)
        if end > len(self._bytes):
            raise self._bad(f"it has {len(self._bytes):,} of {end:,} bytes")

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A tensor, dequantised to float32."""
        info = self.tensors[name]
        return dequantize(self._bytes[info.start : info.stop], info.type).reshape(info.shape)

    def close(self) -> None:
        """End the mapping."""
        self._bytes.close()

    def _bad(self, got: str) -> InputError:
        return InputError(
            "GGUF file",
            got=f"{self.path}: {got}",
            expected="a whole GGUF file",
            hint="download it anew, and compare its size with the source's",
        )

    def _take(self, count: int) -> bytes:
        taken = self._bytes[self._at : self._at + count]
        self._at += count
        if len(taken) != count:
            raise self._bad(f"it ends after {len(self._bytes):,} bytes")
        return taken

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            if kind in _SCALARS:
                form = f"<{count}{_SCALARS[kind]}"
                if struct.calcsize(f"<{_SCALARS[kind]}") * count > len(self._bytes):
                    raise self._bad(f"it has {len(self._bytes):,} bytes and an array of {count:,} numbers")
                return list(struct.unpack(form, self._take(struct.calcsize(form))))
            return [self._value(kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._bad(f"a metadata value of type {kind}")
        return self._number(_SCALARS[kind])

    def _info(self) -> TensorInfo:
        name, rank = self._string(), self._number("I")
        shape = tuple(self._number("Q") for _ in range(rank))[::-1]
        kind, start = self._number("I"), self._number("Q")
        if kind not in _TYPES:
            raise UnsupportedError(
                f"tensor {name}",
                got=f"the type {_OTHERS.get(kind, kind)}",
                expected=f"one of {', '.join(written for written, _, _ in _TYPES.values())}",
                hint="take the file in Q8_0 or F16",
            )
        written, block, size = _TYPES[kind]
        if not shape or shape[-1] % block:
            raise self._bad(f"{name} has the shape {shape}, in blocks of {block}")
        return TensorInfo(name, shape, written, start, start + math.prod(shape) // block * size)


def dequantize(data: bytes, type: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The numbers of a tensor's bytes, in one dimension, float32.

    A block of 32 has a float16 scale d, Q4_1 also a float16 least number m; then the codes: Q8_0 is d * code, Q4_0
    d * (code - 8), Q4_1 d * code + m. The low halves of 16 bytes are codes 0 to 15, the high ones 16 to 31.

    Raises UnsupportedError for other types than `TensorInfo` names.

    Source: llama.cpp, ggml-quants.c.

    Example:
        >>> dequantize(b"\\x00\\x38" + bytes([1, 255] * 16), "Q8_0")[:3].tolist()  # d = 0.5
        [0.5, -0.5, 0.5]
    """
    if type == "F32":
        return np.frombuffer(data, "<f4").astype(np.float32)
    if type == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    if type == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if type not in ("Q8_0", "Q4_0", "Q4_1"):
        raise UnsupportedError("type", got=type, expected="F32, F16, BF16, Q8_0, Q4_0 or Q4_1", hint="take Q8_0")
    head = 4 if type == "Q4_1" else 2
    blocks = np.frombuffer(data, np.uint8).reshape(-1, head + (32 if type == "Q8_0" else 16))
    scales = np.ascontiguousarray(blocks[:, :head]).view("<f2").astype(np.float32)
    codes = blocks[:, head:]
    if type == "Q8_0":
        numbers = codes.view(np.int8) * scales
    else:
        numbers = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float32)
        numbers = (numbers - 8) * scales if type == "Q4_0" else numbers * scales[:, :1] + scales[:, 1:]
    flat: np.ndarray[Any, np.dtype[np.float32]] = numbers.reshape(-1)
    return flat


def convert(
    file: str | os.PathLike[str],
    out_folder: str | os.PathLike[str],
    dtype: str = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
) -> pathlib.Path:
    """Write a GGUF file's model as a Hugging Face folder; one that is there whole, or not at all.

    Args:
        file: a GGUF file of the architecture `llama`.
        out_folder: a new folder: config.json, generation_config.json, model.safetensors, tokenizer.json,
            tokenizer_config.json.
        dtype: of the weights written: `bfloat16`, `float16` or `float32`.
        progress: called with the bytes of tensors that were read, and all of them.

    Returns:
        `out_folder`.

    Raises:
        InputError: no whole GGUF file; a folder that is not empty; tensors that are missing or have wrong shapes;
            weights that are no numbers in `dtype`.
        UnsupportedError: another architecture, tokenizer, tensor type, or a feature that would change the results.
        MissingExtraError: no package `tokenizers`.
    """
    if dtype not in _DTYPES:
        raise InputError("dtype", got=shown(dtype), expected=f"one of {', '.join(_DTYPES)}", hint="take bfloat16")
    out = pathlib.Path(out_folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            "out_folder", got=f"{out}, which is not empty", expected="a new folder", hint="remove it, or name another"
        )
    source = GGUFFile(file)
    config = llama_config(source.fields, {name: info.shape for name, info in source.tensors.items()})
    out.parent.mkdir(parents=True, exist_ok=True)
    made = pathlib.Path(tempfile.mkdtemp(suffix=".tmp", prefix=f".{out.name}-", dir=out.parent))
    try:
        ends = write_tokenizer(source.fields, made)
        _write_json(made / "config.json", {**config, **ends, "dtype": dtype})
        _write_json(made / "generation_config.json", ends)
        _write_weights(source, config, made / "model.safetensors", dtype, progress or (lambda done, total: None))
        made.chmod(0o755)  # mkdtemp's folders are for one user
        if out.exists():
            out.rmdir()  # some systems rename onto no folder, even an empty one
        made.rename(out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    finally:
        source.close()
    return out


def _write_weights(
    source: GGUFFile, config: dict[str, Any], path: pathlib.Path, dtype: str, progress: Callable[[int, int], None]
) -> None:
    """A safetensors file, one tensor after another: a length, a header of JSON, the bytes."""
    names = llama_tensors(config)
    written, size, largest = _DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for target, shape in names.values():
        end = at + math.prod(shape) * size
        header[target] = {"dtype": written, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    total = sum(source.tensors[name].stop - source.tensors[name].start for name in names)
    done = 0
    with open(path, "wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            weight = permuted_heads(name, source.read(name), config)
            least, most = float(weight.min()), float(weight.max())
            if not -largest <= least <= most <= largest:  # neither infinite nor NaN
                raise InputError(
                    f"tensor {name}",
                    got=f"numbers from {least} to {most}",
                    expected=f"finite weights in {dtype}",
                    hint="take dtype='bfloat16'; if that fails, too, download the file anew",
                )
            handle.write(_encoded(weight, dtype).tobytes())
            done += source.tensors[name].stop - source.tensors[name].start
            progress(done, total)


def _encoded(weight: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Finite numbers in the file's type, rounded to nearest even."""
    if dtype == "bfloat16":
        bits = weight.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return weight.astype("<f2" if dtype == "float16" else "<f4")


def _write_json(path: pathlib.Path, entries: dict[str, Any]) -> None:
    path.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
