"""Other rules than the walk: rejection sampling, exact in distribution, and rules that change the output (lossy)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch

from tilewise.core.errors import InputError, shown
from tilewise.core.real import is_finite
from tilewise.engine.decoding.tree import TokenTree, TreeBatch
from tilewise.engine.decoding.verify import Verified, follow, walk
from tilewise.kv.arguments import check_count


class Rejection(NamedTuple):
    """What happens at a node, given its candidates.

    Args:
        accept: (..., k), the probability that candidate i is accepted if those before it were rejected.
        rest: (..., V), the distribution of the token that is drawn if all are rejected.
    """

    accept: torch.Tensor
    rest: torch.Tensor


def reject(p: torch.Tensor, candidates: torch.Tensor, q: torch.Tensor) -> Rejection:
    """Rejection sampling at one node, or many: the token has distribution p, whatever the drafts are.

    Candidate x is accepted with probability min(1, p(x) / q(x)); if it is rejected, p becomes (p - q) where that is
    positive, normalised, for the next candidate. Exact if candidate i is a draw from q[..., i, :], given that those
    before it were rejected: the same distribution each time for independent draws (equal ones are tried again),
    `without_replacement(q, candidates)` for distinct draws, and `certain(candidates, V)` for candidates that were
    chosen without a draw, such as the most likely ones.

    Args:
        p: (..., V), the target's probabilities after temperature and truncation; float32 or float64.
        candidates: int64 (..., k), in the order of their draws.
        q: (..., k, V), the distribution of each draw.

    Returns:
        `Rejection(accept, rest)`.

    Raises:
        InputError: shapes or dtypes do not fit.

    Source: one candidate: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding",
    2022, and Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023; several: Miao
    et al., "SpecInfer: Accelerating Generative Large Language Model Serving with Tree-based Speculative Inference and
    Verification", 2023.

    Example:
        >>> from tilewise.engine.decoding.rules import reject
        >>> p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([[0.25, 0.5, 0.25]])
        >>> [reject(p, torch.tensor([x]), q).accept.item() for x in (0, 1, 2)], reject(p, torch.tensor([2]), q).rest
        ([1.0, 1.0, 0.0], tensor([1., 0., 0.]))
    """
    shape = (*candidates.shape, p.shape[-1])
    if q.shape != shape or p.shape[:-1] != candidates.shape[:-1] or q.dtype != p.dtype or not p.is_floating_point():
        got = f"{q.dtype} {tuple(q.shape)} beside p {p.dtype} {tuple(p.shape)}"
        raise InputError("q", got=got, expected=f"{p.dtype} {shape}", hint="q has a distribution for each candidate")
    accept = []
    for x, each in zip(candidates.unbind(-1), q.unbind(-2), strict=True):
        of_p, of_q = (y.gather(-1, x[..., None])[..., 0] for y in (p, each))
        accept.append(torch.where(of_q > 0, of_p / of_q, 0.0).clamp(max=1.0))  # of q = 0 there is no draw
        left = (p - each).clamp(min=0.0)
        total = left.sum(-1, keepdim=True)
        # where nothing is left p is q but for rounding, and the draw was accepted
        p = torch.where(total > 1e-12, left / total.clamp(min=1e-12), p)
    return Rejection(torch.stack(accept, -1) if accept else p.new_zeros(shape[:-1]), p)


def without_replacement(q: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Distributions of draws that never give the same token twice: q without the candidates before, normalised.

    Args:
        q: (..., V), that of the first.
        candidates: int64 (..., k), all different.

    Returns:
        (..., k, V).
    """
    found = []
    for x in candidates.unbind(-1):
        found.append(q)
        q = q.scatter(-1, x[..., None], 0.0)
        q = q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
    return torch.stack(found, -2)


def certain(candidates: torch.Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Distributions of candidates that were not drawn, (..., k, V): 1 for the candidate."""
    return torch.nn.functional.one_hot(candidates, vocab_size).to(dtype)


def draw(rejection: Rejection, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a candidate, or draw a token of the rest.

    Args:
        rejection: of one node, or many.
        uniforms: (..., k + 1), independent uniform numbers in [0, 1): one for each candidate, the last for the draw.

    Returns:
        (index, token), int64 (...): the accepted candidate's index, k if there is none, and the token drawn from the
        rest, to be emitted if there is none.
    """
    accept, rest = rejection
    good = uniforms[..., :-1] < accept
    index = torch.where(good, torch.arange(accept.shape[-1], device=good.device), accept.shape[-1])
    first = index.amin(-1) if accept.shape[-1] else index.sum(-1)
    below = rest.cumsum(-1)
    token = torch.searchsorted(below, uniforms[..., -1:].to(below.dtype) * below[..., -1:], right=True)[..., 0]
    likely = rest.shape[-1] - 1 - (rest > 0).flip(-1).int().argmax(-1)  # the last that rounding may lead to
    return first, torch.minimum(token, likely)


def reject_path(
    tree: TokenTree, p: torch.Tensor, q: torch.Tensor, uniforms: torch.Tensor
) -> tuple[list[int], list[int]]:
    """`reject` from the root on: descend to the accepted child, until none is.

    Args:
        tree: siblings in the order of their draws; equal draws stay apart, as two nodes.
        p: (nodes, V), the target's probabilities at each node.
        q: (nodes, V), the distribution that each node's token was drawn from, given that the siblings before it were
            rejected; the root's is not used.
        uniforms: (depths, most, 2), depths above the deepest node's and most as many as a node's children: independent
            uniform numbers. [d, i, 0] decides on child i of the node at depth d, [d, 0, 1] draws.

    Returns:
        (path, emitted): accepted nodes, and their tokens with one more.
    """
    node, path = 0, list[int]()
    while True:
        children = [n for n, up in enumerate(tree.parents) if up == node and tree.eligible[n]]
        candidates = torch.tensor([tree.tokens[n] for n in children], dtype=torch.int64, device=p.device)
        random = uniforms[len(path)]
        numbers = torch.cat((random[: len(children), 0], random[:1, 1]))
        index, token = draw(reject(p[node], candidates, q[children]), numbers)
        if int(index) == len(children):
            return path, [*(tree.tokens[n] for n in path), int(token)]
        node = children[int(index)]
        path.append(node)


class Rule(Protocol):
    """Which nodes of trees are accepted.

    Attributes:
        lossy: whether tokens may differ from plain decoding's; outputs say so.
    """

    lossy: ClassVar[bool]

    def __call__(self, batch: TreeBatch, chosen: torch.Tensor, p: torch.Tensor) -> Verified:
        """Verify trees by tokens chosen at each row, and the target's probabilities there, (rows, V)."""


class Walk:
    """`verify.walk` as a rule."""

    lossy: ClassVar[bool] = False

    def __call__(self, batch: TreeBatch, chosen: torch.Tensor, p: torch.Tensor) -> Verified:
        """As `Rule`; `p` is not used."""
        return walk(batch, chosen)


@dataclass(frozen=True)
class Typical:
    """Accept a token whose probability is above min(epsilon, delta * exp(-H)), H the entropy of the distribution.

    Of the longest paths that with the largest probability is taken. With infinite bounds nothing is accepted, which is
    plain decoding; of a greedy target (p is 1 for one token) the rule accepts that token alone.

    Args:
        epsilon: bound for distributions of low entropy.
        delta: bound for those of high entropy, about the root of epsilon.

    Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            _check_bound(name, getattr(self, name))

    def __call__(self, batch: TreeBatch, chosen: torch.Tensor, p: torch.Tensor) -> Verified:
        """As `Rule`."""
        up = batch.parents.long()
        entropy = -torch.xlogy(p, p).sum(-1)
        bound = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        own = p[up, batch.tokens.long()]
        logs = torch.where(batch.eligible, own.log(), 0.0).clamp(min=-1e4)
        return follow(batch, own > bound[up], chosen, _along_paths(batch, logs))


@dataclass(frozen=True)
class TopK:
    """Accept a token that is among the k most likely ones, the lowest index first among equals.

    Args:
        k: of a greedy target 1 is exact.

    Source: Stern, Shazeer and Uszkoreit, "Blockwise Parallel Decoding for Deep Autoregressive Models", 2018.
    """

    k: int
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("k", self.k, 1)

    def __call__(self, batch: TreeBatch, chosen: torch.Tensor, p: torch.Tensor) -> Verified:
        """As `Rule`."""
        of, tokens = p[batch.parents.long()], batch.tokens.long()
        own = of.gather(1, tokens[:, None])
        index = torch.arange(p.shape[1], device=p.device)
        rank = ((of > own) | ((of == own) & (index < tokens[:, None]))).sum(1)
        return follow(batch, rank < self.k, chosen, _along_paths(batch, own[:, 0].log().clamp(min=-1e4)))


@dataclass(frozen=True)
class Distance:
    """Accept a token at most so far from the most likely one, for vocabularies whose tokens are numbers in order
    (in the paper of `TopK`).

    Args:
        most: the largest distance; of a greedy target 0 is exact.
    """

    most: float
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_bound("most", self.most)

    def __call__(self, batch: TreeBatch, chosen: torch.Tensor, p: torch.Tensor) -> Verified:
        """As `Rule`."""
        apart = (batch.tokens.long() - p.argmax(-1)[batch.parents.long()]).abs()
        return follow(batch, apart <= self.most, chosen, _along_paths(batch, -apart.float()))


def _check_bound(name: str, value: float) -> None:
    if not (is_finite(value) or value == float("inf")) or value < 0:
        raise InputError(name, got=shown(value), expected="a number, at least 0", hint="float('inf') is no bound")


def _along_paths(batch: TreeBatch, scores: torch.Tensor) -> torch.Tensor:
    """Sums of scores of each row and its ancestors, roots not counted, by doubling steps."""
    total, up = torch.where(batch.depths > 0, scores.double(), 0.0), batch.parents.long()
    for _ in range(batch.max_depth.bit_length()):
        total, up = total + total[up], up[up]
    return total
