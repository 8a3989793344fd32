"""One module a benchmark; each has `run(options)` and says in its docstring which questions it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Options:
    """What the command line gave. `quick` shrinks every problem: to see that a case runs, not to measure."""

    out: Path
    rounds: int = 60
    only: tuple[str, ...] = ()
    quick: bool = False
    model: str | None = None  # of the engine's cases
    resume: Path | None = None  # where a case keeps what it has found, to go on from there
    parts: set[str] = field(default_factory=set)  # that cases have asked for

    @property
    def device(self) -> str:
        """ "cuda" where PyTorch sees a GPU, else "cpu"."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    def wants(self, name: str) -> bool:
        """Whether --only lets this part of a case run."""
        self.parts.add(name)
        return not self.only or name in self.only

    @property
    def unknown(self) -> list[str]:
        """Names of --only that are no part of what ran."""
        return [name for name in self.only if name not in self.parts]


CASES = {
    "attention_formula": "masks and scores, forward and backward, against compiled FlexAttention and SDPA",
    "exact_grid": "plain attention by head dimension and length, GQA, packed, against cuDNN, FlashAttention-2 and -4",
    "paged": "decoding and prefill over pages, any mix of lengths, against cuDNN on contiguous keys and FlashInfer",
    "serving": "decoding over encoded pages, with shared prefixes, beside a prompt in one call or in two",
    "planning": "the plan of a step on the GPU and on the host, beside FlashInfer's; one plan for eight layers",
    "neighbours": "norms, softmax, SwiGLU, losses and a whole layer against PyTorch, eager and compiled, and QuACK",
    "few_bits": "attention over codes with and without making them, against exact, cuDNN and SageAttention 1.0",
    "sparse": "attention over selected tiles by density, the choice of tiles, both together, beside all tiles",
    "selected_pages": "decoding over the pages or tokens of a KV cache that matter, beside all of them and cuDNN",
    "tuning": "what tune-sparse and tune-quant take from the command to the answer, and the error they settle for",
    "engine": "the generation engine beside transformers and nano-vllm: tokens/s, first tokens, host time, prefixes",
    "engine_equality": "tokens of the engine under every batch, chunk and page size, beside transformers and alone",
    "tile_classes": "classification of 128k x 128k tokens against create_block_mask, time and memory",
    "overhead": "host time per call, first result of a new formula, compilations when numbers change",
    "cpu": "fp32 on the CPU against SDPA, with and without a dense mask, time and memory",
    "cpu_formulas": "formulas in fp32 on the CPU against SDPA with a dense mask or bias, and eager softcap",
    "kv_accuracy": "the error of attention over encoded pages, by kind of code, with keys as they are and rotated",
    "kv_memory": "slots that pages waste, pages that sharing saves, simulated; a million random operations",
}
