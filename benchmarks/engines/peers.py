"""Other engines as contenders: continuous batching and `generate` of transformers, and nano-vllm where it is installed.

transformers gets the same weights; nano-vllm random ones of its own, since it takes Qwen3 alone from a folder.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines.driver import Answered, Run, check, run_of
from benchmarks.engines.ours import TEMPERATURE
from benchmarks.engines.workloads import Request, Workload
from benchmarks.environment import version
from tilewise.core.errors import UnsupportedError
from tilewise.engine.models.load import RANDOM, decoder_of, folder_of
from tilewise.engine.models.shapes import SHAPES

NANO_PAGE = 256  # tokens of a page, the least of nano-vllm


def transformers_model(model: str, dtype: torch.dtype, device: str) -> Any:
    """The model that `decoder_of` makes, with the same weights."""
    import transformers

    if not model.startswith(RANDOM):
        made = transformers.AutoModelForCausalLM.from_pretrained(folder_of(model), dtype=dtype).to(device)
    else:
        config = transformers.AutoConfig.for_model(**SHAPES[model[len(RANDOM) :]])
        with torch.device(device):
            made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        weights = decoder_of(model, dtype=name, device=device).named()
        left = made.load_state_dict(weights, strict=False)
        assert set(left.missing_keys) <= {"lm_head.weight"}, left  # the embedding, where both are one
        assert not left.unexpected_keys, left
    made.set_attn_implementation("sdpa")
    return made.eval()


class Continuous:
    """transformers' continuous batching: a thread of its own takes steps, and stamps tokens when they are there."""

    def __init__(self, model: Any, workload: Workload) -> None:
        import transformers

        options: dict[str, Any] = {}
        if model.device.type == "cpu":  # else it takes nine tenths of the machine's memory
            pages = sum(-(-(turn.prompt + turn.count) // NANO_PAGE) + 1 for turn in workload.turns())
            options = {"num_blocks": pages, "max_batch_tokens": 512}
        config = transformers.generation.ContinuousBatchingConfig(**options)
        self._context = model.continuous_batching_context_manager(
            generation_config=_generation(workload.longest, eos_token_id=-1),
            continuous_batching_config=config,
            block=True,
            timeout=5,
        )
        self._manager = self._context.__enter__()

    def add(self, key: int, request: Request) -> None:
        self._manager.add_request(
            list(request.prompt), request_id=str(key), max_new_tokens=request.count, record_timestamps=True,
            eos_token_id=-1,
        )  # fmt: skip

    def step(self, wait: float) -> list[Answered]:
        found = self._manager.get_result(timeout=max(wait, 1e-3))
        if found is None:
            if not self._manager.is_running():
                raise RuntimeError("transformers' thread has ended")
            return []
        if found.error:
            raise RuntimeError(found.error)
        if not found.is_finished():
            return []
        return [Answered(int(found.request_id), found.timestamps, found.generated_tokens)]

    def close(self) -> None:
        """End its thread."""
        self._context.__exit__(None, None, None)


def generate(model: Any, workload: Workload, batch: int) -> Run:
    """transformers' `generate`, so many requests at a time, padded on the left; each goes on as long as the longest."""
    import transformers

    class Stamps(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    times: dict[int, list[float]] = {}
    start = time.perf_counter()
    for first in range(0, len(workload.requests), batch):
        requests = workload.requests[first : first + batch]
        width = max(len(request.prompt) for request in requests)
        rows = [[0] * (width - len(request.prompt)) + list(request.prompt) for request in requests]
        lengths = torch.tensor([len(request.prompt) for request in requests])
        mask = torch.arange(width)[None] >= width - lengths[:, None]
        count, stamps = max(request.count for request in requests), Stamps()
        found = model.generate(
            torch.tensor(rows).to(model.device), attention_mask=mask.long().to(model.device), streamer=stamps,
            generation_config=_generation(count, min_new_tokens=count),
        )  # fmt: skip
        for n, request in enumerate(requests):
            times[first + n] = stamps.times[1 : 1 + request.count]  # the first is the prompt's
            check(request, found[n, width : width + request.count].tolist(), times[first + n])
    return run_of(time.perf_counter() - start, dict.fromkeys(times, start), times)


def _generation(count: int, **more: Any) -> Any:
    import transformers

    return transformers.GenerationConfig(
        max_new_tokens=count, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, pad_token_id=0, **more
    )  # fmt: skip


# nano-vllm -----------------------------------------------------------------------------------------------------------


def find_nano(device: str) -> tuple[bool, str]:
    """Whether nano-vllm is there, and for the record its version or why it is left out."""
    if device != "cuda":
        return False, f"nano-vllm left out: no kernels for {device}"
    if importlib.util.find_spec("nanovllm") is None:
        return False, "nano-vllm left out: not installed"
    return True, f"nano-vllm is {version('nano-vllm') or 'a checkout'}"


class NanoVllm:
    """nano-vllm, step by step, with random weights, and with our adapter where flash_attn is not installed."""

    def __init__(self, model: str, longest: int, requests: int) -> None:
        shape = SHAPES.get(model.removeprefix(RANDOM), {})
        if shape.get("model_type") != "qwen3":
            raise UnsupportedError(
                "nano-vllm", got=model, expected="a random Qwen3 shape", hint="it knows no other model"
            )
        if importlib.util.find_spec("flash_attn") is None:
            sys.modules["flash_attn"] = _flash_attn()
        runner, engine = (importlib.import_module(f"nanovllm.engine.{name}") for name in ("model_runner", "llm_engine"))
        runner.load_model = _fill
        engine.AutoTokenizer = _NoTokenizer
        nano = importlib.import_module("nanovllm")
        with tempfile.TemporaryDirectory() as folder:
            rope = {"rope_type": "default", "rope_theta": shape["rope_theta"]}
            text = json.dumps(shape | {"dtype": "bfloat16", "pad_token_id": 0, "rope_parameters": rope})
            (Path(folder) / "config.json").write_text(text, encoding="utf-8")
            self._llm = nano.LLM(folder, max_model_len=longest, max_num_seqs=requests, kvcache_block_size=NANO_PAGE)
        self._params = nano.SamplingParams
        self._live: dict[int, Any] = {}
        self._seen: dict[int, int] = {}

    def add(self, key: int, request: Request) -> None:
        params = self._params(temperature=TEMPERATURE, ignore_eos=True, max_tokens=request.count)
        self._llm.add_request(list(request.prompt), params)
        self._live[key], self._seen[key] = self._llm.scheduler.waiting[-1], 0

    def step(self, wait: float) -> list[Answered]:
        self._llm.step()
        now, found = time.perf_counter(), []
        for key, sequence in list(self._live.items()):
            count = sequence.num_completion_tokens
            if count > self._seen[key]:
                answer = sequence.completion_token_ids if sequence.is_finished else None
                found.append(Answered(key, [now] * (count - self._seen[key]), answer))
                self._seen[key] = count
                if answer is not None:
                    del self._live[key]
        return found


def _fill(model: Any, folder: str) -> None:
    """Random weights in the place of a checkpoint's."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)


class _NoTokenizer:
    eos_token_id = -1

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> _NoTokenizer:
        return cls()


def _flash_attn() -> types.ModuleType:
    """Our adapter by flash_attn's name. nano-vllm makes a GPU the default device while it starts, which is not ours."""
    from tilewise.adapters import flash_attn

    def at_home(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.device("cpu"):
                return function(*args, **kwargs)

        return call

    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)  # transformers asks for it
    module.__dict__["flash_attn_varlen_func"] = at_home(flash_attn.flash_attn_varlen_func)
    module.__dict__["flash_attn_with_kvcache"] = at_home(flash_attn.flash_attn_with_kvcache)
    return module
