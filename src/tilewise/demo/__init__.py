"""The demo: a small Llama-style model learns Python from the standard library, through `tilewise.attention` and the
fused layers (norms, rotary embedding, SwiGLU, loss).

A second model with bitwise equal weights learns from the same batches through PyTorch's operators; the two loss curves
must agree. Then the first model writes code. `tilewise demo` is the command, `run(Options())` the function.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

import tilewise
from tilewise.core.errors import InputError, UnsupportedError, shown
from tilewise.demo import data, memory
from tilewise.demo.data import Tokenizer
from tilewise.demo.model import ModelConfig, generate
from tilewise.demo.operators import TORCH_OPERATORS, Attend, tilewise_operators
from tilewise.demo.options import SIZES, TOLERANCE, Options, Size
from tilewise.demo.result import OURS, TORCH, Curves, Result
from tilewise.demo.train import Learner, held_out_loss, threads, train
from tilewise.demo.view import View

__all__ = ["SIZES", "TOLERANCE", "Options", "Result", "Size", "run"]

TILED_STEPS = 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run(options: Options, view: View | None = None, *, attend: Attend | None = None) -> Result:
    """Train, compare, generate.

    Args:
        options: the choices; what is None in them is taken from the size and the machine.
        view: told about each stage and step; None shows nothing.
        attend: replaces `tilewise.attention` in the model (q, k, v of (batch, seqlen, heads, head_dim) -> o): tests
            pass a wrong one.

    Returns:
        The result, whose `passed` says whether the loss curves agree within the tolerance.

    Raises:
        InputError: too little text, or an unknown size, dtype or device.
        UnsupportedError: `impl` cannot train this model.
        MissingExtraError: the package tokenizers is missing.

    Example: `run(Options(size="tiny", device="cpu")).passed` is True.
    """
    view = view or View()
    began = time.perf_counter()
    device, dtype, size_name, size = resolve(options)
    view.note(
        f"device {describe(device)}, {dtype}; "
        f"size {size_name}: {size.steps} steps of {size.batch} sequences of {size.seqlen} tokens"
    )

    config, kind = size.model(size.vocab_size, size.seqlen), DTYPES[dtype]
    implementation = "given by the caller" if attend else chosen(config, size.batch, device, kind, options.impl)

    corpus = data.read_corpus(options.text, max_bytes=size.max_bytes, seed=options.seed)
    tokenizer = Tokenizer(corpus.train, size.vocab_size)
    train_stream, valid_stream = tokenizer.stream(corpus.train), tokenizer.stream(corpus.valid)
    view.note(
        f"text: {corpus.origin}, {len(corpus.train) + len(corpus.valid)} files, {corpus.num_bytes / 1e6:.1f} MB; "
        f"byte-level BPE with {tokenizer.vocab_size} tokens; {train_stream.numel():,} training tokens"
    )

    config = replace(config, vocab_size=tokenizer.vocab_size)
    ours = tilewise_operators(options.impl)
    contenders = [(OURS, replace(ours, attend=attend) if attend else ours, size.steps)]
    if options.compare:
        contenders.append((TORCH, TORCH_OPERATORS, size.steps))
    if options.compare and implementation == "cpu_sdpa" and options.impl is None:
        # cpu_sdpa is PyTorch's kernel, so a model with the library's own tiled kernel learns for some steps, too.
        contenders.append(("tilewise cpu_tiled", tilewise_operators("cpu_tiled"), min(TILED_STEPS, size.steps)))
    learners = [
        Learner.create(name, operators, config, seed=options.seed, device=device, dtype=kind, steps=steps)
        for name, operators, steps in contenders
    ]
    view.note(
        f"model: {learners[0].model.num_parameters() / 1e6:.2f} M parameters, {config.num_layers} layers, "
        f"{config.num_heads_q} query heads, {config.num_heads_kv} KV heads, head_dim {config.head_dim}; "
        f"tilewise.attention runs {implementation}"
    )

    batches = data.batches(train_stream, batch=size.batch, seqlen=size.seqlen, steps=size.steps, seed=options.seed)
    prepared = time.perf_counter()
    with view.training(size.steps, learners):
        train(learners, batches, size.steps, view.step)
    trained = time.perf_counter()

    held_out = held_out_loss(learners[0], valid_stream, batch=size.batch)
    prompt = tokenizer.encode(options.prompt.rstrip()) or [tokenizer.end]
    with threads(1):  # one token at a time is too little work to share
        tokens = generate(
            learners[0].model,
            prompt,
            max_new_tokens=options.new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
            stop=tokenizer.end,
        )
    heads = (config.num_heads_q, config.num_heads_kv, config.head_dim)
    measured = tuple(memory.measure(device, *heads)) if options.compare and attend is None else ()
    done = time.perf_counter()
    return Result(
        options=replace(
            options,
            prompt=options.prompt.rstrip(),
            size=size_name,
            steps=size.steps,
            batch=size.batch,
            seqlen=size.seqlen,
            dtype=dtype,
        ),
        device=describe(device),
        implementation=implementation,
        parameters=learners[0].model.num_parameters(),
        text=corpus.origin,
        text_bytes=corpus.num_bytes,
        train_tokens=train_stream.numel(),
        vocab_size=tokenizer.vocab_size,
        curves=Curves({learner.name: tuple(learner.losses) for learner in learners}),
        tolerance=TOLERANCE[dtype] if options.tolerance is None else options.tolerance,
        step_ms={learner.name: learner.median_ms for learner in learners},
        held_out_loss=held_out,
        held_out_bytes_per_token=sum(len(t.encode()) for t in corpus.valid) / valid_stream.numel(),
        generated=tokenizer.decode(tokens[len(prompt) :]),
        new_tokens=len(tokens) - len(prompt),
        seconds={
            "prepare": prepared - began,
            "train": trained - prepared,
            "generate": done - trained,
            "total": done - began,
        },
        memory=measured,
        in_turns=device.type != "cpu",
    )


def resolve(options: Options) -> tuple[torch.device, str, str, Size]:
    """Device, dtype name, size name, and the size with the options' overrides; raises InputError."""
    expected, hint = "cpu, cuda or cuda:N", "leave it out for the GPU, or the CPU where there is none"
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise InputError("device", got=shown(options.device), expected=expected, hint=hint) from error
    if device.type not in ("cpu", "cuda"):
        raise InputError("device", got=device.type, expected=expected, hint=hint)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        expected = f"one of the {torch.cuda.device_count()} CUDA devices here, or cpu"
        raise InputError("device", got=str(device), expected=expected, hint=hint)
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    if dtype not in DTYPES:
        hint = "leave it out for bf16 on a GPU, fp32 on the CPU"
        raise InputError("dtype", got=shown(dtype), expected=" or ".join(DTYPES), hint=hint)
    name = options.size or ("medium" if device.type == "cuda" else "small")
    if name not in SIZES:
        hint = "leave it out for medium on a GPU, small on the CPU"
        raise InputError("size", got=shown(name), expected=", ".join(SIZES), hint=hint)
    overrides = {
        key: getattr(options, key) for key in ("steps", "batch", "seqlen") if getattr(options, key) is not None
    }
    for key, value in overrides.items():
        if value < (2 if key == "seqlen" else 1):
            expected = "a positive number" if key != "seqlen" else "at least 2"
            raise InputError(key, got=value, expected=expected, hint="leave it out for that of the size")
    return device, dtype, name, replace(SIZES[name], **overrides)


def chosen(config: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype, impl: str | None) -> str:
    """Name of the implementation that `tilewise.attention` takes in training; raises UnsupportedError if none can."""
    rows = [batch, config.seqlen, config.num_heads_q, config.head_dim]
    q = torch.empty(rows, device=device, dtype=dtype, requires_grad=True)
    k = torch.empty([*rows[:2], config.num_heads_kv, rows[3]], device=device, dtype=dtype)
    explanation = tilewise.why(q, k, k, mask=tilewise.causal, impl=impl)
    if explanation.chosen is None:
        hint = "leave impl out for the first that can"
        raise UnsupportedError("impl", got=impl, expected=f"one that can train here:\n{explanation}", hint=hint)
    return explanation.chosen


def describe(device: torch.device) -> str:
    """The device in words: a GPU's name, or the CPU with PyTorch's number of threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu ({torch.get_num_threads()} threads)"
