"""Choices and numbers of one case, all of which follow from its name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")
IN_A_ROW = 3  # cases that share what decides which kernels are compiled
HALVES = (torch.float16, torch.bfloat16)
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 191, 255, 257, 300)
LONG = (385, 513, 777, 1025, 2049)
DIMS = (1, 2, 3, 5, 8, 16, 24, 31, 32, 33, 40, 63, 64, 64, 65, 80, 96, 100, 127, 128, 128, 129, 192, 256, 257, 512)
PAGE_SIZES = (1, 2, 3, 5, 7, 16, 16, 31, 32, 64, 100, 128, 255, 256)
MEMORY = ("plain", "heads first", "padded", "odd", "expanded")


class Name(NamedTuple):
    """Of a case: what it is replayed by."""

    seed: str
    worker: int
    case: int

    def __str__(self) -> str:
        return f"{self.seed}:{self.worker}:{self.case}"

    @staticmethod
    def of(text: str) -> Name:
        """The name that reads so; ValueError for another text."""
        seed, worker, case = text.rsplit(":", 2)
        return Name(seed, int(worker), int(case))


class Draw:
    """`structure` decides which kernels run, and is the same for neighbours; `sizes` all else."""

    def __init__(self, name: Name, device: str, small: bool = False) -> None:
        self.name, self.device, self.small = name, device, small
        self.structure = random.Random(f"{name.seed}:{name.worker}:{name.case // IN_A_ROW} structure")
        self.sizes = random.Random(f"{name.seed}:{name.worker}:{name.case} sizes")
        self.generator = torch.Generator().manual_seed(self.sizes.randrange(2**31))

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def kernel(self, choices: Sequence[T]) -> T:
        """A choice that neighbours share."""
        return self.structure.choice(choices)

    def kernel_chance(self, share: float) -> bool:
        """True in this share of runs of neighbours."""
        return self.structure.random() < share

    def one(self, choices: Sequence[T]) -> T:
        """A choice of this case alone."""
        return self.sizes.choice(choices)

    def chance(self, share: float) -> bool:
        """True in this share of cases."""
        return self.sizes.random() < share

    def dtype(self, *, wide: bool = True) -> torch.dtype:
        """Mostly 16 bits; float64 on a CPU alone, and neither it nor float32 without `wide`."""
        more = [torch.float32, torch.float32, *([] if self.on_gpu else [torch.float64])] if wide else []
        return self.kernel([*HALVES * 3, *more])

    def length(self) -> int:
        """Of a sequence."""
        if self.small:
            return self.one([n for n in LENGTHS if n < 140])
        return self.one(LENGTHS + (LONG if self.on_gpu else ()))

    def dim(self) -> int:
        """Of a head."""
        return self.kernel([n for n in DIMS if not self.small or n <= 129])

    # tensors, made on the CPU: the same numbers on every device ------------------------------------------------------

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> torch.Tensor:
        """Numbers around 0."""
        return (torch.randn(shape, generator=self.generator) * factor).to(dtype).to(self.device)

    def integers(self, below: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """From 0 to below - 1."""
        return torch.randint(0, max(below, 1), shape, generator=self.generator).to(dtype).to(self.device)

    def flags(self, share: float, *shape: int) -> torch.Tensor:
        """Bool, this share of them True."""
        return (torch.rand(shape, generator=self.generator) < share).to(self.device)

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        """These, int32."""
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def sums(self, values: Sequence[int]) -> torch.Tensor:
        """0 and the running sums, int32."""
        total, found = 0, [0]
        for value in values:
            total += value
            found.append(total)
        return self.ints(found)

    def strided(self, x: torch.Tensor) -> torch.Tensor:
        """The same numbers, at times not contiguous."""
        kind = self.structure.random()
        if kind < 0.6 or x.ndim == 0:
            return x
        if kind < 0.8:
            return torch.stack([x, torch.ones_like(x)], -1)[..., 0]
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    def rows(self, shape: Sequence[int], dtype: torch.dtype, memory: str) -> torch.Tensor:
        """Numbers (..., rows, heads, dim) that lie in memory of NaN as one of MEMORY says."""
        *lead, n, heads, dim = shape
        if memory == "heads first":
            x = self._nan(*lead, heads, n, dim, dtype=dtype).transpose(-3, -2)
        elif memory == "padded":
            x = self._nan(*lead, n + 2, heads + 1, dim + 8 + -dim % 8, dtype=dtype)[..., 1 : n + 1, :heads, :dim]
        elif memory == "odd":
            x = self._nan(*lead, n + 1, heads, dim + 3, dtype=dtype)[..., 1:, :, 1 : dim + 1]
        elif memory == "expanded" and lead and lead[0] > 1:
            x = self._nan(1, *lead[1:], n, heads, dim, dtype=dtype)
        else:
            x = self._nan(*shape, dtype=dtype)
        x.copy_(torch.randn(x.shape, generator=self.generator))
        return x.expand(*shape)

    def matrix(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Numbers (rows, width), contiguous or a slice of something wider."""
        return self.rows((rows, 1, width), dtype, self.kernel(("plain", "padded", "odd")))[:, 0]

    def _nan(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)
