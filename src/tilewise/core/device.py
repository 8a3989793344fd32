"""A table of NVIDIA GPUs, Volta to Blackwell: the figures a kernel author plans with, each row with its source.

Units: bytes, bytes per second, operations per second. Memory sizes are the vendor's decimal gigabytes; caches and
shared memory are binary. Peaks are dense (no 2:4 sparsity) and, on tensor cores, with fp32 accumulation (int32 for
int8), since attention accumulates in fp32. A figure that the hardware lacks, or that no source states, is `None`:
never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tilewise.core.errors import InputError, UnsupportedError

# Bytes of one stored element. tf32 is a way to multiply fp32 numbers, so it is stored in four bytes.
ITEMSIZE: dict[str, float] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "fp4": 0.5}

KIB, MIB, GB, TERA = 1024, 1024 * 1024, 10**9, 10**12


@dataclass(frozen=True)
class TensorCore:
    """One generation of matrix units and the largest tile one instruction multiplies, per operand type.

    `tiles` holds (dtype, (m, n, k)) pairs: an instruction computes an m × n tile of C from m × k and k × n operands.
    Source of the shapes: PTX ISA, "Warp Level Matrix Instructions", "wgmma" and "tcgen05" sections.
    """

    generation: int
    instruction: str
    tiles: tuple[tuple[str, tuple[int, int, int]], ...]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Operand types that this generation multiplies."""
        return tuple(dtype for dtype, _ in self.tiles)

    def tile(self, dtype: str) -> tuple[int, int, int]:
        """Instruction tile (m, n, k) for `dtype`; raises UnsupportedError where the generation has none."""
        for known, shape in self.tiles:
            if known == dtype:
                return shape
        raise UnsupportedError(
            "dtype", got=dtype, expected=", ".join(self.dtypes), hint=f"operands of {self.instruction}"
        )


@dataclass(frozen=True)
class Architecture:
    """Limits that every GPU of one compute capability shares (bytes, 32-bit registers, threads, blocks).

    `shared_memory_per_block` is what a block may opt in to; `tensor_memory_per_sm` is data-centre Blackwell's store for
    accumulators. Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    """

    name: str
    compute_capability: tuple[int, int]
    shared_memory_per_sm: int
    shared_memory_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    tensor_core: TensorCore
    tensor_memory_per_sm: int = 0
    registers_per_sm: int = 65536
    registers_per_thread: int = 255


@dataclass(frozen=True)
class Peaks:
    """Dense peak rates, operations per second; None where the type does not exist or no source states a figure."""

    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    int8: float | None = None
    fp4: float | None = None


@dataclass(frozen=True)
class GPU:
    """One product. `aliases` are names it also answers to, such as the driver's (`torch.cuda.get_device_name`)."""

    name: str
    architecture: Architecture
    num_sms: int
    l2_bytes: int | None
    memory_bytes: int
    memory_bandwidth: float
    peaks: Peaks
    source: str
    aliases: tuple[str, ...] = ()

    def peak(self, dtype: str) -> float:
        """Dense peak for `dtype` in operations per second; raises UnsupportedError where this GPU has none."""
        if dtype not in ITEMSIZE:
            raise InputError("dtype", got=dtype, expected=", ".join(ITEMSIZE), hint="a type name, not a torch.dtype")
        rate: float | None = getattr(self.peaks, dtype)
        if rate is None:
            known = tuple(name for name in ITEMSIZE if getattr(self.peaks, name) is not None)
            raise UnsupportedError("dtype", got=dtype, expected=", ".join(known), hint=f"peaks stated for {self.name}")
        return rate

    def ridge(self, dtype: str) -> float:
        """Operations per byte above which a kernel on this GPU is bound by compute (the roofline's ridge point)."""
        return self.peak(dtype) / self.memory_bandwidth


def _same(shape: tuple[int, int, int], *dtypes: str) -> tuple[tuple[str, tuple[int, int, int]], ...]:
    return tuple((dtype, shape) for dtype in dtypes)


_AMPERE_TILES = _same((16, 8, 16), "fp16", "bf16") + _same((16, 8, 8), "tf32") + _same((16, 8, 32), "int8")
_ADA_TILES = _AMPERE_TILES + _same((16, 8, 32), "fp8")
_HOPPER_TILES = _same((64, 256, 16), "fp16", "bf16") + _same((64, 256, 8), "tf32") + _same((64, 256, 32), "fp8", "int8")
_SM100_TILES = (
    _same((128, 256, 16), "fp16", "bf16")
    + _same((128, 256, 8), "tf32")
    + _same((128, 256, 32), "fp8", "int8")
    + _same((128, 256, 64), "fp4")
)
_TENSOR_1 = TensorCore(1, "mma.m8n8k4", _same((8, 8, 4), "fp16"))
_TENSOR_2 = TensorCore(2, "mma.m16n8k8", _same((16, 8, 8), "fp16") + _same((8, 8, 16), "int8"))
_TENSOR_3 = TensorCore(3, "mma.m16n8k16", _AMPERE_TILES)
_TENSOR_4_ADA = TensorCore(4, "mma.m16n8k16", _ADA_TILES)
_TENSOR_4_HOPPER = TensorCore(4, "wgmma.m64n256k16", _HOPPER_TILES)
_TENSOR_5 = TensorCore(5, "tcgen05.mma (one CTA)", _SM100_TILES)
_TENSOR_5_RTX = TensorCore(5, "mma.m16n8k16", _ADA_TILES + _same((16, 8, 64), "fp4"))

VOLTA = Architecture("Volta", (7, 0), 96 * KIB, 96 * KIB, 2048, 32, _TENSOR_1)
TURING = Architecture("Turing", (7, 5), 64 * KIB, 64 * KIB, 1024, 16, _TENSOR_2)
AMPERE = Architecture("Ampere", (8, 0), 164 * KIB, 163 * KIB, 2048, 32, _TENSOR_3)
AMPERE_RTX = Architecture("Ampere", (8, 6), 100 * KIB, 99 * KIB, 1536, 16, _TENSOR_3)
ADA = Architecture("Ada Lovelace", (8, 9), 100 * KIB, 99 * KIB, 1536, 24, _TENSOR_4_ADA)
HOPPER = Architecture("Hopper", (9, 0), 228 * KIB, 227 * KIB, 2048, 32, _TENSOR_4_HOPPER)
BLACKWELL = Architecture("Blackwell", (10, 0), 228 * KIB, 227 * KIB, 2048, 32, _TENSOR_5, 256 * KIB)
BLACKWELL_RTX = Architecture("Blackwell", (12, 0), 100 * KIB, 99 * KIB, 1536, 24, _TENSOR_5_RTX)


def _peaks(
    fp32: float,
    tf32: float | None = None,
    half: float | None = None,
    *,
    bf16: bool = True,
    fp8: float | None = None,
    int8: float | None = None,
    fp4: float | None = None,
) -> Peaks:
    """Peaks in a datasheet's unit, TFLOP/s; fp16 and bf16 run at one rate wherever both exist."""
    rates = (fp32, tf32, half, half if bf16 else None, fp8, int8, fp4)
    return Peaks(*(None if rate is None else rate * TERA for rate in rates))


def _gpu(
    name: str,
    arch: Architecture,
    sms: int,
    l2: int | None,
    memory: int,
    rate: int,
    peaks: Peaks,
    source: str,
    *aliases: str,
) -> GPU:
    """A row in a datasheet's units: L2 in MiB, memory in GB, memory rate in GB/s."""
    return GPU(name, arch, sms, None if l2 is None else l2 * MIB, memory * GB, rate * GB, peaks, source, aliases)


_V100 = "NVIDIA Tesla V100 GPU Architecture white paper (SXM2); V100 datasheet"
_T4 = "NVIDIA Turing GPU Architecture white paper; T4 datasheet"
_A100 = "NVIDIA A100 Tensor Core GPU Architecture white paper; A100 datasheet"
_A30 = "NVIDIA A30 datasheet; L2: TechPowerUp GPU database"
_A10 = "NVIDIA A10 datasheet; SMs, L2: TechPowerUp GPU database"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture white paper"
_ADA = "NVIDIA Ada GPU Architecture white paper"
_L4 = "NVIDIA L4 datasheet (sparse figures halved); SMs, L2: TechPowerUp GPU database"
_L40S = "NVIDIA L40S datasheet (L2 left out: public sources disagree)"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture white paper; H100 datasheet"
_H200 = "NVIDIA H200 datasheet (SXM; L2 not stated there); SMs and peaks as H100 SXM"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip datasheet (L2 not stated there); SMs and peaks as H100 SXM"
_B200 = 'NVIDIA Blackwell datasheet (HGX B200, sparse figures halved); SMs, L2: Chips and Cheese, "Nvidia\'s B200"'
_GB202 = "NVIDIA RTX Blackwell GPU Architecture white paper"

_GV100_PEAKS = _peaks(15.7, half=125, bf16=False)
_GA100_PEAKS = _peaks(19.5, 156, 312, int8=624)
_GH100_PEAKS = _peaks(66.9, 494.7, 989.4, fp8=1978.9, int8=1978.9)
_AD102_PEAKS = _peaks(82.6, 82.6, 165.2, fp8=330.3, int8=660.6)
_GB200_PEAKS = _peaks(75, 1100, 2250, fp8=4500, int8=4500, fp4=9000)
_GB202_PEAKS = _peaks(104.8, 104.8, 209.5, fp8=419, int8=838, fp4=1676)

GPUS: tuple[GPU, ...] = (
    _gpu("V100-16GB", VOLTA, 80, 6, 16, 900, _GV100_PEAKS, _V100, "Tesla V100-SXM2-16GB"),
    _gpu("V100-32GB", VOLTA, 80, 6, 32, 900, _GV100_PEAKS, _V100, "V100", "Tesla V100-SXM2-32GB"),
    _gpu("T4", TURING, 40, 4, 16, 320, _peaks(8.1, half=65, bf16=False, int8=130), _T4, "Tesla T4"),
    _gpu("A100-40GB", AMPERE, 108, 40, 40, 1555, _GA100_PEAKS, _A100, "A100-SXM4-40GB", "A100-PCIE-40GB"),
    _gpu("A100-80GB", AMPERE, 108, 40, 80, 2039, _GA100_PEAKS, _A100, "A100", "A100-SXM4-80GB"),
    _gpu("A100-80GB-PCIe", AMPERE, 108, 40, 80, 1935, _GA100_PEAKS, _A100, "A100 80GB PCIe"),
    _gpu("A30", AMPERE, 56, 24, 24, 933, _peaks(10.3, 82, 165, int8=330), _A30),
    _gpu("A10", AMPERE_RTX, 72, 6, 24, 600, _peaks(31.2, 62.5, 125, int8=250), _A10),
    _gpu("RTX 3090", AMPERE_RTX, 82, 6, 24, 936, _peaks(35.6, 35.6, 71, int8=284), _GA102, "GeForce RTX 3090"),
    _gpu("RTX 4090", ADA, 128, 72, 24, 1008, _AD102_PEAKS, _ADA, "GeForce RTX 4090"),
    _gpu("L4", ADA, 58, 48, 24, 300, _peaks(30.3, 60, 121, fp8=242.5, int8=242.5), _L4),
    _gpu("L40S", ADA, 142, None, 48, 864, _peaks(91.6, 183, 362.05, fp8=733, int8=733), _L40S),
    _gpu("H100-PCIe", HOPPER, 114, 50, 80, 2000, _peaks(51.2, 378, 756, fp8=1513, int8=1513), _H100, "H100 PCIe"),
    _gpu("H100-SXM", HOPPER, 132, 50, 80, 3350, _GH100_PEAKS, _H100, "H100", "H100 SXM5", "H100 80GB HBM3"),
    _gpu("H200", HOPPER, 132, None, 141, 4800, _GH100_PEAKS, _H200, "H200 SXM"),
    _gpu("GH200-96GB", HOPPER, 132, None, 96, 4000, _GH100_PEAKS, _GH200, "GH200", "GH200 480GB"),
    _gpu("GH200-144GB", HOPPER, 132, None, 144, 4900, _GH100_PEAKS, _GH200, "GH200 144G HBM3e"),
    _gpu("B200", BLACKWELL, 148, 126, 180, 7700, _GB200_PEAKS, _B200, "HGX B200"),
    _gpu("RTX 5090", BLACKWELL_RTX, 170, 96, 32, 1792, _GB202_PEAKS, _GB202, "GeForce RTX 5090"),
)


def _key(name: str) -> str:
    """A name without the vendor's prefix, case, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", ""))


_BY_KEY: dict[str, GPU] = {_key(name): gpu for gpu in GPUS for name in (gpu.name, *gpu.aliases)}


def find(name: str) -> GPU:
    """The GPU called `name`, by the table's name or an alias; case, spaces and punctuation do not matter.

    Only whole names match, since neighbours differ (an A10G is not an A10). Raises InputError listing the known names.
    """
    gpu = _BY_KEY.get(_key(name)) if isinstance(name, str) else None
    if gpu is None:
        known = ", ".join(known.name for known in GPUS)
        raise InputError("gpu", got=name, expected=f"one of: {known}", hint="see tilewise.core.device.GPUS")
    return gpu


def current(index: int | None = None) -> GPU | None:
    """The table's row for this process's CUDA device, by its driver name; None without CUDA or where it is not listed.

    `index` is the CUDA device (default: the current one). PyTorch is imported here, not with the module.
    """
    try:
        import torch
    except ImportError:
        return None
    cuda: Any = torch.cuda
    if not cuda.is_available():
        return None
    return _BY_KEY.get(_key(cuda.get_device_name(index)))
