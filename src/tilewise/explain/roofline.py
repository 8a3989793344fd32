"""The roofline of an attention problem, or of work that was counted elsewhere: operations, compulsory traffic, and the
least time a GPU of the table needs for it.

Conventions (Dao, FlashAttention-2, 2023): two floating-point operations a multiply-add, only visible (query, key)
pairs counted, softmax not counted. Forward is two matrix products, backward five (one of them S again). Bytes are
compulsory ones: each tensor crosses memory once, keys that no query may see are not read. The model: Williams,
Waterman and Patterson, "Roofline", 2009. A kernel cannot be faster than `floor_seconds`; how close it comes is its
efficiency.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tilewise.core import device
from tilewise.core.device import GPU
from tilewise.core.errors import InputError

Direction = Literal["forward", "backward", "decode"]


@dataclass(frozen=True)
class Problem:
    """One attention call; the last query has the position of the last key (bottom-right alignment).

    Args:
        seqlen_q, seqlen_k: sequence lengths; 0 for seqlen_k is seqlen_q.
        batch: batch size.
        num_heads_q, num_heads_kv: numbers of heads; 0 for num_heads_kv is num_heads_q, which it must divide.
        head_dim, head_dim_v: of q and k, and of v; 0 for head_dim_v is head_dim.
        causal: whether keys after the query are hidden.
        window: (left, right) as in `tilewise.window`: i - left < j <= i + right; None on a side means no limit.
        dtype: "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4"; gradients are stored in the same type.
        direction: "forward", "backward" (the gradient alone), or "decode" (a forward of few queries).

    Raises:
        InputError: a size below 1, heads that do not divide, or an unknown direction or dtype.

    Source: Dao, "FlashAttention-2", 2023, for how operations are counted.

    Example:
        >>> from tilewise.explain.roofline import Problem
        >>> Problem(8192, causal=True, num_heads_q=32, num_heads_kv=8).flops()
        549822922752
    """

    seqlen_q: int
    seqlen_k: int = 0
    batch: int = 1
    num_heads_q: int = 1
    num_heads_kv: int = 0
    head_dim: int = 128
    head_dim_v: int = 0
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    dtype: str = "bf16"
    direction: Direction = "forward"

    def __post_init__(self) -> None:
        for name, default in (
            ("seqlen_k", self.seqlen_q),
            ("num_heads_kv", self.num_heads_q),
            ("head_dim_v", self.head_dim),
        ):
            object.__setattr__(self, name, getattr(self, name) or default)
        for name in ("seqlen_q", "seqlen_k", "batch", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                hint = "leave out what has a default"
                raise InputError(name, got=getattr(self, name), expected="an integer of at least 1", hint=hint)
        if self.num_heads_q % self.num_heads_kv:
            raise InputError(
                "num_heads_q",
                got=self.num_heads_q,
                expected=f"a multiple of {self.num_heads_kv} KV heads",
                hint="each key/value head serves num_heads_q / num_heads_kv query heads",
            )
        if self.direction not in ("forward", "backward", "decode"):
            hint = "decode is a forward of one query"
            raise InputError("direction", got=self.direction, expected="forward, backward or decode", hint=hint)
        if self.dtype not in device.ITEMSIZE:
            hint = "of q, k, v and their gradients"
            raise InputError("dtype", got=self.dtype, expected=", ".join(device.ITEMSIZE), hint=hint)

    @classmethod
    def decode(
        cls,
        seqlen_k: int,
        *,
        seqlen_q: int = 1,
        batch: int = 1,
        num_heads_q: int = 1,
        num_heads_kv: int = 0,
        head_dim: int = 128,
        dtype: str = "bf16",
    ) -> Problem:
        """One decoding step.

        Args:
            seqlen_k: keys in the cache, the new ones included.
            seqlen_q: new tokens: 1, or a few with speculative decoding.
            batch, num_heads_q, num_heads_kv, head_dim, dtype: as in `Problem`.

        Returns:
            A `Problem` with direction "decode".
        """
        return cls(
            seqlen_q, seqlen_k, batch, num_heads_q, num_heads_kv, head_dim, causal=True, dtype=dtype, direction="decode"
        )

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """(left, right) with causality folded in."""
        left, right = self.window
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    def visible_pairs(self) -> int:
        """The visible pairs of a query and a key.

        Returns:
            Their number, for one head of one batch element.
        """
        return visible_pairs(self.seqlen_q, self.seqlen_k, *self.bounds)

    def visible_keys(self) -> int:
        """The keys that at least one query sees, which must be read.

        Returns:
            Their number, for one head of one batch element.
        """
        return visible_keys(self.seqlen_q, self.seqlen_k, *self.bounds)

    def flops(self) -> int:
        """The floating-point operations of the matrix products, for visible pairs.

        Returns:
            Their number, for the whole call.
        """
        pairs = self.batch * self.num_heads_q * self.visible_pairs()
        if self.direction == "backward":  # S, dQ, dK are head_dim deep; dP, dV head_dim_v
            return 2 * pairs * (3 * self.head_dim + 2 * self.head_dim_v)
        return 2 * pairs * (self.head_dim + self.head_dim_v)

    def bytes(self) -> int:
        """The compulsory traffic: q, k, v in, o and lse (fp32) out; a backward reads these and do, writes dq, dk, dv.

        Returns:
            Bytes, for the whole call.
        """
        queries = self.batch * self.num_heads_q * self.seqlen_q
        keys = self.batch * self.num_heads_kv * self.visible_keys()
        q, kv, o = queries * self.head_dim, keys * (self.head_dim + self.head_dim_v), queries * self.head_dim_v
        elements = 2 * (q + kv + o) if self.direction == "backward" else q + kv + o
        return int(elements * device.ITEMSIZE[self.dtype]) + 4 * queries


@dataclass(frozen=True)
class Work:
    """Operations and bytes that were counted elsewhere.

    Args:
        operations: floating-point operations.
        moved: bytes loaded and stored.
        dtype: the peak of the GPU at which the operations run, as in `Problem`.

    Raises:
        InputError: a count below 1, or an unknown dtype.

    Example:
        >>> from tilewise.explain.roofline import Work, estimate
        >>> estimate(Work(operations=1_000_000, moved=1_000_000), "H200").bound
        'memory'
    """

    operations: int
    moved: int
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("operations", "moved"):
            if getattr(self, name) < 1:
                hint = "what does nothing has no roofline"
                raise InputError(name, got=getattr(self, name), expected="an integer of at least 1", hint=hint)
        if self.dtype not in device.ITEMSIZE:
            hint = "of the operations, not of what is stored"
            raise InputError("dtype", got=self.dtype, expected=", ".join(device.ITEMSIZE), hint=hint)

    def flops(self) -> int:
        """The operations.

        Returns:
            Their number.
        """
        return self.operations

    def bytes(self) -> int:
        """The bytes.

        Returns:
            Their number.
        """
        return self.moved


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int | None = None, right: int | None = None) -> int:
    """Pairs with i - left < j <= i + right, for keys j in [0, seqlen_k) and queries i at the end of the key axis."""

    def reached(shift: int) -> int:
        """Pairs with j <= i + shift: the sum over queries of clamp(i + shift + 1, 0, seqlen_k)."""

        def ramp(stop: int) -> int:
            """Sum of clamp(t, 0, seqlen_k) over t below stop."""
            inside = min(max(stop, 0), seqlen_k + 1)
            return inside * (inside - 1) // 2 + max(0, stop - inside) * seqlen_k

        first = seqlen_k - seqlen_q + shift + 1
        return ramp(first + seqlen_q) - ramp(first)

    upper = seqlen_q * seqlen_k if right is None else reached(right)
    return max(0, upper - (0 if left is None else reached(-left)))


def visible_keys(seqlen_q: int, seqlen_k: int, left: int | None = None, right: int | None = None) -> int:
    """Keys seen by at least one query; 0 where the window is empty."""
    first_query, last_query = seqlen_k - seqlen_q, seqlen_k - 1
    low = 0 if left is None else max(0, first_query - left + 1)
    high = seqlen_k - 1 if right is None else min(seqlen_k - 1, last_query + right)
    empty = left is not None and right is not None and left + right < 1
    return 0 if empty else max(0, high - low + 1)


@dataclass(frozen=True)
class Roofline:
    """A problem on a GPU: see the properties; `str()` gives a table of them."""

    problem: Problem | Work
    gpu: GPU
    flops: int = field(init=False)
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", self.problem.flops())
        object.__setattr__(self, "bytes", self.problem.bytes())

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOP per byte."""
        return self.flops / self.bytes

    @property
    def compute_seconds(self) -> float:
        """Time of the matrix products at the dense peak."""
        return self.flops / self.gpu.peak(self.problem.dtype)

    @property
    def memory_seconds(self) -> float:
        """Time of the compulsory traffic at the memory's rate."""
        return self.bytes / self.gpu.memory_bandwidth

    @property
    def floor_seconds(self) -> float:
        """No kernel is faster: the larger of the two times."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def bound(self) -> Literal["compute", "memory"]:
        """What the floor comes from."""
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"

    @property
    def attainable(self) -> float:
        """FLOP/s under the roof at this intensity."""
        return self.flops / self.floor_seconds

    def efficiency(self, seconds: float) -> float:
        """Share of the floor in a measured time, at most 1 for a correct measurement on this GPU."""
        return self.floor_seconds / seconds

    def __str__(self) -> str:
        dtype = self.problem.dtype
        rows = (
            ("GPU", f"{self.gpu.name} ({self.gpu.architecture.name})"),
            ("work", f"{self.flops / 1e9:,.3f} GFLOP"),
            ("compulsory traffic", f"{self.bytes / 1e6:,.3f} MB"),
            ("arithmetic intensity", f"{self.intensity:,.1f} FLOP/byte"),
            ("ridge point", f"{self.gpu.ridge(dtype):,.1f} FLOP/byte ({dtype})"),
            ("bound", self.bound),
            ("time at peak compute", _microseconds(self.compute_seconds)),
            ("time at peak bandwidth", _microseconds(self.memory_seconds)),
            ("floor time", _microseconds(self.floor_seconds)),
            ("attainable", f"{self.attainable / 1e12:,.1f} TFLOP/s of {self.gpu.peak(dtype) / 1e12:,.1f}"),
        )
        return "\n".join(f"{name:<24}{value}" for name, value in rows)


def estimate(problem: Problem | Work, gpu: GPU | str) -> Roofline:
    """The least time of a problem on a GPU, and what limits it.

    Args:
        problem: an attention call, or counted work.
        gpu: a row of `tilewise.core.device.GPUS`, or a name in it.

    Returns:
        A `Roofline`.

    Raises:
        InputError: an unknown GPU.
        UnsupportedError: the table has no peak of this GPU for the problem's dtype.

    Example:
        >>> from tilewise.explain.roofline import Problem, estimate
        >>> estimate(Problem(8192, causal=True, num_heads_q=32, num_heads_kv=8), "H200").bound
        'compute'
    """
    row = device.find(gpu) if isinstance(gpu, str) else gpu
    row.peak(problem.dtype)
    return Roofline(problem, row)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.2f} µs"
