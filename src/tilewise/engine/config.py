"""Sizes and choices of an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.flags import check_flags
from tilewise.engine.decoding.methods import Speculation, speculation_of
from tilewise.kv.arguments import check_count

LARGEST_GRAPH = 512  # requests of a step that is a graph, at most
ENCODINGS = (None, "int8", "fp8", "int4")


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and choices of an engine.

    Args:
        max_model_len: tokens of a prompt and its answer at most; None is what the model was made for.
        memory: share of a GPU's memory for weights and pages. On a CPU pages take 1 GiB.
        num_pages: pages of the KV cache, in place of what `memory` would give. Layers of different windows have pages
            of their own.
        kv_encoding: None keeps keys and values as they are; "int8", "fp8" or "int4" quantizes them.
        page_size: tokens of a page.
        max_batch_tokens: tokens that a step computes at most.
        max_running: requests that have pages at a time, by priority and arrival.
        max_waiting: requests that may wait; `add` refuses more.
        prefix_cache: whether prompts that begin alike share pages.
        deterministic: whether an answer's bits, and so its tokens, are the same whatever shares the batch: on a GPU by
            products and attention whose sums do not depend on it, which are slower. On a CPU in float32 tokens are the
            same either way.
        graphs: whether steps are CUDA graphs, recorded at the start; None is True on a GPU. On a CPU steps are padded
            in the same way, and nothing is recorded.
        speculative: how tokens are proposed, which one step verifies together: None, a method of `Speculation`, or a
            `Speculation`. Tokens stay the same.
        lag: steps that the host is behind the device; None is 1 on a GPU and 0 on a CPU.

    Raises:
        InputError: a value out of range.

    Example:
        >>> tw.engine.EngineConfig(max_model_len=4096, kv_encoding="int8").page_size
        16
    """

    max_model_len: int | None = None
    memory: float = 0.9
    num_pages: int | None = None
    kv_encoding: str | None = None
    page_size: int = 16
    max_batch_tokens: int = 8192
    max_running: int = 256
    max_waiting: int = 16384
    prefix_cache: bool = True
    deterministic: bool = False
    graphs: bool | None = None
    speculative: Speculation | str | None = None
    lag: int | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batch_tokens", "max_running", "max_waiting"):
            check_count(name, getattr(self, name), 1)
        for name, least in (("max_model_len", 2), ("num_pages", 1), ("lag", 0)):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least)
        if not isinstance(self.memory, (int, float)) or isinstance(self.memory, bool) or not 0 < self.memory <= 1:
            hint = "a share of the device's memory"
            raise InputError("memory", got=shown(self.memory), expected="a number above 0, up to 1", hint=hint)
        if self.kv_encoding not in ENCODINGS:
            expected = ", ".join(map(repr, ENCODINGS))
            raise InputError(
                "kv_encoding", got=shown(self.kv_encoding), expected=expected, hint="None keeps them exact"
            )
        check_flags(prefix_cache=self.prefix_cache, deterministic=self.deterministic)
        if self.graphs is not None and not isinstance(self.graphs, bool):
            hint = "None is True on a GPU"
            raise InputError("graphs", got=shown(self.graphs), expected="None, True or False", hint=hint)
        speculation_of("speculative", self.speculative)

    @property
    def speculation(self) -> Speculation | None:
        """`speculative` as a `Speculation`."""
        return speculation_of("speculative", self.speculative)

    def graphs_on(self, device: torch.device) -> bool:
        """Whether steps are padded to sizes that graphs are recorded for.

        Args:
            device: where the engine runs.

        Returns:
            `graphs`, or what None means there.
        """
        return device.type == "cuda" if self.graphs is None else self.graphs

    def lag_on(self, device: torch.device) -> int:
        """Steps that may be under way while the host plans the next."""
        return (1 if device.type == "cuda" else 0) if self.lag is None else self.lag
