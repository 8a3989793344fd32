"""Queries, keys and values of the demo's model, layer by layer, as attention is given them: real ones, if small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise.demo import DTYPES, data, resolve
from tilewise.demo.data import Tokenizer
from tilewise.demo.model import Attention, Llama
from tilewise.demo.operators import tilewise_operators
from tilewise.demo.options import Options, Size
from tilewise.demo.train import Learner, train

Layer = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Trained:
    """The demo's model after the steps that were asked for, and held-out text as tokens."""

    learner: Learner
    held_out: Tensor
    size: Size
    seed: int

    @classmethod
    def by(cls, options: Options, longest: int = 0, every: int = data.EVERY) -> Trained:
        """Train one (at least one step), which takes sequences of `longest` tokens, too, where that is more than it
        learns from; one of `every` files is held out.

        Raises:
            InputError, MissingExtraError: as `tilewise.demo.run`.
        """
        device, dtype, _, size = resolve(options)
        corpus = data.read_corpus(options.text, max_bytes=size.max_bytes, seed=options.seed, every=every)
        tokenizer = Tokenizer(corpus.train, size.vocab_size)
        config = size.model(tokenizer.vocab_size, max(size.seqlen, longest))
        learner = Learner.create(
            "tilewise", tilewise_operators(options.impl), config, seed=options.seed, device=device,
            dtype=DTYPES[dtype], steps=size.steps,
        )  # fmt: skip
        shape = {"batch": size.batch, "seqlen": size.seqlen, "seed": options.seed}
        batches = data.batches(tokenizer.stream(corpus.train), steps=size.steps, **shape)
        train([learner], batches, size.steps, lambda step: None)
        return cls(learner, tokenizer.stream(corpus.valid), size, options.seed)

    def activations(self, batch: int, seqlen: int) -> list[Layer]:
        """(q, k, v) of each layer for `batch` sequences of held-out text, causal: (batch, seqlen, heads, head_dim),
        rotated, of the dtype that attention was given.
        """
        inputs, targets = next(data.batches(self.held_out, batch=batch, seqlen=seqlen, steps=1, seed=self.seed))
        with recording(self.learner.model) as layers, torch.no_grad():
            self.learner.loss(inputs, targets)
        return layers


def activations(options: Options) -> list[Layer]:
    """`Trained.activations` of as many sequences, and as long ones, as a step learns from; options: size, steps, batch,
    seqlen, text, device, dtype, seed and impl count.
    """
    model = Trained.by(options)
    return model.activations(model.size.batch, model.size.seqlen)


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
