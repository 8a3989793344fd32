"""What a tile configuration costs on chip: shared memory, registers, tensor memory, and the blocks an SM then holds.

The model of a fused forward kernel: q's tile and a ring of `stages` k and v tiles in shared memory; the fp32
accumulators S (block_m × block_n) and acc (block_m × head_dim_v), and P as a 16-bit operand, spread over the threads
of the warps that multiply. Where the next S is computed while P still feeds P·V (`overlap`, FlashAttention-3) both
are held; otherwise P takes the place of S. This is a lower bound: addresses, loop state and row statistics come on
top (`RESERVE` registers per thread are kept for them). The compiler has the last word; the model says what is not worth
compiling. It agrees with the tiles of FlashAttention-2 and -3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewise.core import device
from tilewise.core.device import GPU
from tilewise.core.errors import InputError

RESERVE = 16  # registers per thread for addresses, loop counters and the row statistics m and l
RESERVED_SHARED = 1024  # bytes the driver keeps of each block's shared memory, compute capability 8.0 and later


@dataclass(frozen=True)
class Tile:
    """A configuration of a forward kernel.

    Args:
        block_m, block_n: query rows and key columns of a tile.
        head_dim, head_dim_v: widths of q and k, and of v (default head_dim).
        dtype: of q, k and v: "fp16", "bf16", "fp8", "int8", "fp32", "tf32".
        stages: k and v tiles in flight.
        warps: warps that multiply.
        producer_warps: warps that only load (warp specialisation, Hopper and later); they hand registers over to the
            others (`setmaxnreg`).
        q_in_registers: q's tile is moved out of shared memory before the loop.
        p_in_shared: P goes through shared memory instead of registers.
        overlap: the next S is computed while P feeds P·V, so that S and P are held together.

    Raises:
        InputError: a size below 1, or an unknown dtype.

    Example:
        >>> from tilewise.explain.resources import Tile
        >>> Tile(128, 64, 128, warps=4).registers()  # 32-bit registers of a thread, for its accumulators
        192
    """

    block_m: int
    block_n: int
    head_dim: int
    head_dim_v: int = 0
    dtype: str = "bf16"
    stages: int = 2
    warps: int = 4
    producer_warps: int = 0
    q_in_registers: bool = False
    p_in_shared: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)
        for name in ("block_m", "block_n", "head_dim", "head_dim_v", "stages", "warps"):
            if getattr(self, name) < 1:
                hint = "block_m, block_n and head_dim are powers of 2 in real kernels"
                raise InputError(name, got=getattr(self, name), expected="an integer of at least 1", hint=hint)
        if self.producer_warps < 0:
            raise InputError("producer_warps", got=self.producer_warps, expected="0 or more", hint="0 for none")
        if self.dtype not in device.ITEMSIZE:
            hint = "bf16 and fp16 have one size"
            raise InputError("dtype", got=self.dtype, expected=", ".join(device.ITEMSIZE), hint=hint)

    @property
    def threads(self) -> int:
        """Threads of the block, producers included."""
        return 32 * (self.warps + self.producer_warps)

    @property
    def itemsize(self) -> float:
        """Bytes of an element of q, k and v."""
        return device.ITEMSIZE[self.dtype]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block; the output tile reuses q's."""
        q = 0 if self.q_in_registers else self.block_m * self.head_dim
        p = self.block_m * self.block_n if self.p_in_shared else 0
        return int(self.itemsize * (q + p + self.stages * self.block_n * (self.head_dim + self.head_dim_v)))

    @property
    def accumulator_bytes(self) -> int:
        """fp32 S and acc of a block."""
        return 4 * self.block_m * (self.block_n + self.head_dim_v)

    def registers(self, tensor_memory: bool = False) -> int:
        """32-bit registers that a multiplying thread needs for its share of the tiles.

        Args:
            tensor_memory: whether acc is in tensor memory (Blackwell).

        Returns:
            A number of registers.
        """
        words = self.block_m * (self.block_n if tensor_memory else self.block_n + self.head_dim_v)
        operands = self.block_m * self.block_n if self.overlap and not self.p_in_shared else 0
        operands += self.block_m * self.head_dim if self.q_in_registers else 0
        return _ceil_div(words + int(operands * self.itemsize / 4), 32 * self.warps)


@dataclass(frozen=True)
class Budget:
    """A tile on a GPU. `unmet` names the first limit it breaks ("" when it fits); `blocks_per_sm` is 0 then."""

    tile: Tile
    gpu: GPU
    shared_bytes: int
    shared_limit: int
    registers: int
    register_limit: int
    tensor_memory_bytes: int
    blocks_per_sm: int
    unmet: str

    @property
    def fits(self) -> bool:
        """Whether nothing is exceeded."""
        return not self.unmet

    def __str__(self) -> str:
        rows = [
            ("GPU", f"{self.gpu.name} ({self.gpu.architecture.name})"),
            ("tile", f"{self.tile.block_m} × {self.tile.block_n}, head_dim {self.tile.head_dim}, {self.tile.dtype}"),
            ("shared memory", f"{self.shared_bytes / 1024:.1f} of {self.shared_limit / 1024:.0f} KiB a block"),
            ("registers", f"{self.registers} + {RESERVE} of {self.register_limit} a thread"),
            ("blocks per SM", f"{self.blocks_per_sm}"),
            ("fits", "yes" if self.fits else f"no: {self.unmet}"),
        ]
        if self.tensor_memory_bytes:
            limit = self.gpu.architecture.tensor_memory_per_sm
            rows.insert(4, ("tensor memory", f"{self.tensor_memory_bytes / 1024:.0f} of {limit / 1024:.0f} KiB an SM"))
        return "\n".join(f"{name:<16}{value}" for name, value in rows)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def register_limit(tile: Tile, gpu: GPU) -> int:
    """The most registers that a multiplying thread can have if one block has the SM to itself.

    With producer warps, registers are reallocated in steps of 8: producers keep 24 per thread (32 with three or more
    consumer warpgroups), as in FlashAttention-3.

    Args:
        tile: a configuration.
        gpu: a row of `tilewise.core.device.GPUS`.

    Returns:
        A number of registers.

    Example:
        >>> from tilewise.core import device
        >>> from tilewise.explain.resources import Tile, register_limit
        >>> register_limit(Tile(128, 128, 128, warps=8, producer_warps=4), device.find("H100"))
        240
    """
    arch = gpu.architecture
    if not tile.producer_warps:
        return min(arch.registers_per_thread, arch.registers_per_sm // tile.threads // 8 * 8)
    kept = 32 * tile.producer_warps * (32 if tile.warps >= 12 else 24)
    return min(arch.registers_per_thread, (arch.registers_per_sm - kept) // (32 * tile.warps) // 8 * 8)


def budget(tile: Tile, gpu: GPU | str) -> Budget:
    """The resources that a tile configuration uses on a GPU, and the first limit that it exceeds.

    Args:
        tile: a configuration.
        gpu: a row of `tilewise.core.device.GPUS`, or a name in it.

    Returns:
        A `Budget`: memory and registers with their limits, the blocks that an SM holds, and the limit that is not met.

    Raises:
        InputError: an unknown GPU.

    Example:
        >>> from tilewise.explain.resources import Tile, budget
        >>> budget(Tile(128, 64, 128, warps=4, stages=1), "A100").fits
        True
    """
    row = device.find(gpu) if isinstance(gpu, str) else gpu
    arch = row.architecture
    tensor_memory = tile.accumulator_bytes if arch.tensor_memory_per_sm else 0
    registers, limit = tile.registers(bool(arch.tensor_memory_per_sm)), register_limit(tile, row)
    unmet = ""
    if tile.dtype != "fp32" and tile.dtype not in arch.tensor_core.dtypes:
        unmet = f"{arch.name} tensor cores do not multiply {tile.dtype}"
    elif tile.producer_warps and arch.compute_capability < (9, 0):
        unmet = "warp specialisation needs Hopper or later"
    elif tile.shared_bytes > arch.shared_memory_per_block:
        unmet = f"shared memory {tile.shared_bytes} > {arch.shared_memory_per_block} bytes a block"
    elif registers + RESERVE > limit:
        unmet = f"registers {registers} + {RESERVE} > {limit} a thread"
    elif tensor_memory > arch.tensor_memory_per_sm:
        unmet = f"tensor memory {tensor_memory} > {arch.tensor_memory_per_sm} bytes an SM"
    elif tile.threads > 1024:
        unmet = f"{tile.threads} threads > 1024 a block"
    reserved = RESERVED_SHARED if arch.compute_capability >= (8, 0) else 0
    used = arch.registers_per_sm if tile.producer_warps else tile.threads * _ceil_div(registers + RESERVE, 8) * 8
    blocks = min(
        arch.shared_memory_per_sm // (tile.shared_bytes + reserved),
        arch.registers_per_sm // used,
        arch.threads_per_sm // tile.threads,
        arch.blocks_per_sm,
        arch.tensor_memory_per_sm // tensor_memory if tensor_memory else arch.blocks_per_sm,
    )
    return Budget(
        tile,
        row,
        tile.shared_bytes,
        arch.shared_memory_per_block,
        registers,
        limit,
        tensor_memory,
        0 if unmet else blocks,
        unmet,
    )


def fitting(gpu: GPU | str, head_dim: int, *, head_dim_v: int = 0, dtype: str = "bf16") -> Iterator[Budget]:
    """The configurations of a small grid that fit, those with the most reuse first.

    Grid: block_m and block_n 32 to 256 by powers of two, 4 or 8 warps, 1 to 4 stages. Reuse is FLOP per byte of k and
    v, which grows with block_m; then larger block_n, more stages and fewer warps come first.
    """
    grid = (
        Tile(block_m, block_n, head_dim, head_dim_v, dtype, stages, warps)
        for block_m in (256, 128, 64, 32)
        for block_n in (256, 128, 64, 32)
        for stages in (4, 3, 2, 1)
        for warps in (4, 8)
    )
    return (result for result in (budget(tile, gpu) for tile in grid) if result.fits)
