"""Cases of `cross_entropy` and `linear_cross_entropy`, and what PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import tilewise as tw
from tilewise.ops.cross_entropy.problem import make_call, make_linear_call
from tilewise.ops.cross_entropy.table import CROSS_ENTROPY, LINEAR_CROSS_ENTROPY
from tilewise.ops.operation import Operation
from tilewise.testing import operators

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LossCase:
    """Logits of tokens, or with `hidden` a linear layer that makes them, `chunk` tokens at a time. A part `ignored` of
    the tokens has no class. `sliced` rows lie in wider ones.
    """

    name: str
    tokens: tuple[int, ...] = (6,)
    vocabulary: int = 40
    hidden: int | None = None
    bias: bool = False
    ignored: float = 0.3
    ignore_index: int = -100
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    reduction: str = "mean"
    chunk: int | None = None
    sliced: bool = False

    def __repr__(self) -> str:
        return self.name

    @property
    def terms(self) -> dict[str, Any]:
        """The arguments that say what is added up."""
        return {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.smoothing,
            "z_loss": self.z_loss,
            "reduction": self.reduction,
        }


LOGITS = [
    *(LossCase(f"vocabulary_{n}", vocabulary=n) for n in (1, 7, 63, 64, 1000)),
    LossCase("sum", (3, 5), reduction="sum"),
    LossCase("none", (3, 5), reduction="none"),
    LossCase("one_token", (), reduction="none", ignored=0.0),
    LossCase("smooth", (9,), 50, smoothing=0.1),
    LossCase("smooth_none", (9,), 50, smoothing=0.3, reduction="none"),
    LossCase("all_smooth", (4,), 30, smoothing=1.0),
    LossCase("z_loss", (9,), 50, z_loss=0.01, smoothing=0.1, reduction="sum"),
    LossCase("ignore_0", (12,), 8, ignore_index=0),
    LossCase("nothing_ignored", (12,), 8, ignored=0.0),
    LossCase("all_ignored", (4,), 8, ignored=1.0),
    LossCase("all_ignored_sum", (4,), 8, ignored=1.0, reduction="sum"),
    LossCase("sliced", (2, 7), 48, sliced=True),
]
LINEAR = [
    LossCase("linear", (10,), 40, 16),
    LossCase("linear_chunks", (11,), 37, 16, chunk=4),
    LossCase("linear_bias", (2, 5), 40, 16, bias=True, chunk=3, reduction="sum"),
    LossCase("linear_none", (2, 5), 40, 16, bias=True, reduction="none", chunk=4),
    LossCase("linear_softcap", (9,), 33, 8, softcap=2.0, smoothing=0.1, z_loss=0.01, chunk=4),
    LossCase("linear_softcap_none", (9,), 33, 8, softcap=2.0, smoothing=0.1, z_loss=0.01, chunk=4, reduction="none"),
    LossCase("linear_all_ignored", (5,), 20, 8, ignored=1.0),
    LossCase("linear_one", (1,), 1, 1, ignored=0.0),
]
BY_NAME = {case.name: case for case in (*LOGITS, *LINEAR)}


def make_inputs(case: LossCase, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensors:
    """logits, or x, weight and bias; target."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, spread: float = 1.0) -> torch.Tensor:
        return (spread * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_()

    if case.hidden is None:
        inputs = {"logits": normal(*case.tokens, case.vocabulary, spread=3.0)}
    else:
        inputs = {"x": normal(*case.tokens, case.hidden)}
        inputs["weight"] = normal(case.vocabulary, case.hidden, spread=2.0 * case.hidden**-0.5)
        if case.bias:
            inputs["bias"] = normal(case.vocabulary)
    target = torch.randint(case.vocabulary, case.tokens, generator=generator)
    ignored = torch.rand(case.tokens, generator=generator) < case.ignored
    inputs["target"] = target.masked_fill(ignored, case.ignore_index).to(device)
    return inputs


def ours(case: LossCase, impl: str | None) -> operators.Function:
    """The function under test, of what `make_inputs` gives."""

    def logits_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if case.sliced:
            logits = torch.cat([logits, logits[..., :16]], -1)[..., : case.vocabulary]
        return tw.cross_entropy(logits, target, **case.terms, impl=impl)

    def linear_loss(
        x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return tw.linear_cross_entropy(
            x, weight, target, bias=bias, softcap=case.softcap, chunk=case.chunk, **case.terms, impl=impl
        )

    return logits_loss if case.hidden is None else linear_loss


def plain(case: LossCase) -> operators.Function:
    """The same in PyTorch, at any dtype, with a loss that is float32 at least."""

    def logits_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, case.vocabulary)
        label = target.reshape(-1)
        loss = F.cross_entropy(
            logits, label, ignore_index=case.ignore_index, label_smoothing=case.smoothing, reduction="none"
        )
        seen = label != case.ignore_index
        loss = loss + torch.where(seen, case.z_loss * torch.logsumexp(logits, -1) ** 2, 0.0)
        if case.reduction == "none":
            return loss.view(target.shape)
        return loss.sum() / seen.sum() if case.reduction == "mean" else loss.sum()

    def linear_loss(
        x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = F.linear(x, weight, bias)
        if case.softcap is not None:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logits = case.softcap * torch.tanh(logits / case.softcap)
        return logits_loss(logits, target)

    return logits_loss if case.hidden is None else linear_loss


def check(case: LossCase, dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    """`case` is as near to the truth as it must be."""
    inputs = make_inputs(case, dtype, device)
    if case.ignored == 1.0 and case.reduction == "mean":
        loss = ours(case, impl)(**inputs)
        leaves = [x for x in inputs.values() if x.requires_grad]
        assert isinstance(loss, torch.Tensor)
        assert loss.isnan()
        assert not any(x.any() for x in torch.autograd.grad(loss, leaves))
        return
    largest = 1.0 + float(max(x.detach().abs().max() for x in inputs.values() if x.requires_grad))
    operators.check(ours(case, impl), plain(case), inputs, _terms(case, inputs, largest))


def check_large_sums(reduction: str, impl: str, device: str = "cpu") -> None:
    """Gradients that float16 holds, of sums over tokens that it does not: divided by the operation or by the caller."""
    x = torch.full((2048, 8), 64.0, dtype=torch.float16, device=device)
    weight = torch.zeros(4, 8, dtype=torch.float16, device=device, requires_grad=True)
    bias = torch.zeros(4, dtype=torch.float16, device=device, requires_grad=True)
    target = torch.zeros(len(x), dtype=torch.int64, device=device)
    loss = tw.linear_cross_entropy(x, weight, target, bias=bias, reduction=reduction, chunk=512, impl=impl)
    loss = loss / len(x) if reduction == "sum" else loss.mean()
    found = torch.autograd.grad(loss, (weight, bias))
    slopes = torch.tensor([-0.75, 0.25, 0.25, 0.25], dtype=torch.float16, device=device)
    torch.testing.assert_close(found, (64.0 * slopes[:, None].expand(4, 8), slopes))


def check_far_logits(offset: float, linear: bool, impl: str, device: str = "cpu") -> None:
    """Loss and gradients of logits that all have a large number added, which no probability depends on."""
    near = (
        torch.randn(5, 300, generator=torch.Generator().manual_seed(1)) if abs(offset) < 2**20 else torch.zeros(5, 300)
    )
    logits = near + offset  # rounded: these are the logits, and float64 has what follows from them
    target = torch.arange(5, device=device)
    for reduction in ("mean", "none"):
        if linear:
            one = torch.ones(5, 1, device=device, requires_grad=True)
            logits = logits[:1].expand(5, -1)
            weight = logits[0, :, None].to(device).requires_grad_()
            loss = tw.linear_cross_entropy(one, weight, target, reduction=reduction, impl=impl)
        else:
            weight = logits.to(device).requires_grad_()
            loss = tw.cross_entropy(weight, target, label_smoothing=0.1, reduction=reduction, impl=impl)
        wide = logits.double().requires_grad_()
        want = F.cross_entropy(wide, target.cpu(), label_smoothing=0.0 if linear else 0.1, reduction=reduction)
        (slopes,) = torch.autograd.grad(want.sum(), wide)
        found = torch.autograd.grad(loss.sum(), weight)[0].cpu()
        torch.testing.assert_close(loss.cpu(), want.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found, (slopes.sum(0)[:, None] if linear else slopes).float(), rtol=1e-5, atol=1e-6)


def _terms(case: LossCase, inputs: Tensors, largest: float) -> dict[str, float]:
    """An error in a logit, of which there are `hidden` terms, multiplies a probability, and so a gradient."""
    found = operators.results(plain(case), inputs)
    scores = largest if case.hidden is None else largest * largest * case.hidden**0.5
    sizes = {name: float(x.abs().max()) for name, x in found.items()}
    return {name: scores * max(1.0, 1.0 / size) if size else 0.0 for name, size in sizes.items()}


def _logits_variant(**terms: Any) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        logits = torch.zeros(16, width, dtype=dtype, requires_grad=True)
        given = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "reduction": "mean"} | terms
        return CROSS_ENTROPY, make_call(logits, torch.zeros(16, dtype=torch.int64), **given)

    return make


def _linear_variant(softcap: float | None, reduction: str) -> Callable[[int, torch.dtype], tuple[Operation[Any], Any]]:
    def make(width: int, dtype: torch.dtype) -> tuple[Operation[Any], Any]:
        x = torch.zeros(16, 32, dtype=dtype, requires_grad=True)
        weight = torch.zeros(width, 32, dtype=dtype, requires_grad=True)
        target = torch.zeros(16, dtype=torch.int64)
        return LINEAR_CROSS_ENTROPY, make_linear_call(x, weight, None, target, -100, 0.0, 0.0, softcap, reduction, None)

    return make


VARIANTS = {
    "mean": _logits_variant(),
    "smooth": _logits_variant(label_smoothing=0.1, reduction="none"),
    "linear": _linear_variant(None, "mean"),
    "softcap": _linear_variant(30.0, "none"),
}
