"""The demo's options and sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tilewise.demo.model import ModelConfig

PROMPT = "class Reader:\n    def __init__(self, path):\n        self.path = path"


@dataclass(frozen=True)
class Size:
    """A model and its training: `steps` of `batch` sequences of `seqlen` tokens; `max_bytes` caps the text."""

    dim: int
    num_layers: int
    num_heads_q: int
    num_heads_kv: int
    hidden: int
    vocab_size: int
    seqlen: int
    batch: int
    steps: int
    max_bytes: int

    def model(self, vocab_size: int, seqlen: int) -> ModelConfig:
        return ModelConfig(
            vocab_size, self.dim, self.num_layers, self.num_heads_q, self.num_heads_kv, self.hidden, seqlen
        )


SIZES: dict[str, Size] = {
    "tiny": Size(32, 2, 2, 1, 96, 512, 64, 4, 30, 300_000),
    "small": Size(64, 3, 2, 1, 176, 1024, 128, 8, 200, 2_000_000),
    "medium": Size(512, 8, 8, 2, 1408, 4096, 1024, 16, 600, 12_000_000),
    "large": Size(1024, 16, 16, 4, 2816, 8192, 2048, 16, 1000, 12_000_000),
}

# Largest accepted difference of the two loss curves, nats, by the dtype of q, k and v.
TOLERANCE: dict[str, float] = {"fp32": 2e-3, "bf16": 0.1}


@dataclass(frozen=True)
class Options:
    """Choices of one run; None means the default of the size, or of the machine.

    Args:
        size: a name in SIZES; "small" on a CPU, "medium" on a GPU.
        steps, batch, seqlen: replace those of the size.
        text: own files and directories instead of the standard library.
        device: "cpu", "cuda", "cuda:1", …; a GPU if there is one.
        dtype: "fp32" or "bf16" (autocast) for the matrix products; bf16 on a GPU, fp32 on a CPU.
        seed: of the weights, the order of the data and the sampling.
        prompt, new_tokens, temperature, top_k: of the generated text. White space at the end of the prompt is dropped,
            since the model's next token may begin with it.
        impl: the implementation of `tilewise.attention` in training; None lets it choose.
        compare: also train a second model through PyTorch's operators, and measure what attention keeps.
        tolerance: largest accepted difference of the loss curves, in nats; None: TOLERANCE of the dtype.
    """

    size: str | None = None
    steps: int | None = None
    batch: int | None = None
    seqlen: int | None = None
    text: tuple[Path, ...] = field(default=())
    device: str | None = None
    dtype: str | None = None
    seed: int = 0
    prompt: str = PROMPT
    new_tokens: int = 96
    temperature: float = 0.8
    top_k: int = 30
    impl: str | None = None
    compare: bool = True
    tolerance: float | None = None
