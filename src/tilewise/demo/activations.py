"""Queries, keys and values of the demo's model, layer by layer, as attention is given them: real ones, if small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.demo import DTYPES, data, resolve
from tilewise.demo.data import Tokenizer
from tilewise.demo.model import Attention, Llama
from tilewise.demo.operators import tilewise_operators
from tilewise.demo.options import Options
from tilewise.demo.train import Learner, train

Layer = tuple[Tensor, Tensor, Tensor]


def activations(options: Options) -> list[Layer]:
    """(q, k, v) of each layer for held-out text, causal, after the steps that `options` ask for (at least one).

    Args:
        options: size, steps, batch, seqlen, text, device, dtype and seed count; the last sequences are of `seqlen`
            tokens, `batch` of them.

    Returns:
        A tuple a layer, (batch, seqlen, heads, head_dim), rotated, of the dtype that attention was given.

    Raises:
        InputError, MissingExtraError: as `tilewise.demo.run`.
    """
    device, dtype, _, size = resolve(options)
    corpus = data.read_corpus(options.text, max_bytes=size.max_bytes, seed=options.seed)
    tokenizer = Tokenizer(corpus.train, size.vocab_size)
    config = replace(size.model(size.vocab_size, size.seqlen), vocab_size=tokenizer.vocab_size)
    learner = Learner.create(
        "tilewise", tilewise_operators(options.impl), config, seed=options.seed, device=device, dtype=DTYPES[dtype],
        steps=size.steps,
    )  # fmt: skip
    shape = {"batch": size.batch, "seqlen": size.seqlen, "seed": options.seed}
    batches = data.batches(tokenizer.stream(corpus.train), steps=size.steps, **shape)
    train([learner], batches, size.steps, lambda step: None)
    inputs, targets = next(data.batches(tokenizer.stream(corpus.valid), steps=1, **shape))
    with recording(learner.model) as layers, torch.no_grad():
        learner.loss(inputs, targets)
    return layers


@contextmanager
def recording(model: Llama) -> Iterator[list[Layer]]:
    """A list to which each attention of the model adds what it is given, in the order of calls."""
    layers: list[Layer] = []
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    operators = model.operators

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers.append((q.detach(), k.detach(), v.detach()))
        return operators.attend(q, k, v)

    for module in modules:
        module.operators = replace(operators, attend=attend)
    try:
        yield layers
    finally:
        for module in modules:
            module.operators = operators
