"""The GPU table is consistent with itself and with the arithmetic of the hardware it describes."""

import math

import pytest

from tilewise.core import device
from tilewise.core.errors import InputError, TilewiseError, UnsupportedError

FP32_CORES = {(7, 0): 64, (7, 5): 64, (8, 0): 64}  # an SM; 128 in the others (architecture white papers)
# Boost clocks of the datasheets and white papers, GHz.
CLOCK = {
    "V100-16GB": 1.53, "V100-32GB": 1.53, "T4": 1.59, "A100-40GB": 1.41, "A100-80GB": 1.41, "A100-80GB-PCIe": 1.41,
    "A30": 1.44, "A10": 1.695, "RTX 3090": 1.695, "RTX 4090": 2.52, "L4": 2.04, "L40S": 2.52, "H100-PCIe": 1.755,
    "H100-SXM": 1.98, "H200": 1.98, "GH200-96GB": 1.98, "GH200-144GB": 1.98, "B200": 1.98, "RTX 5090": 2.407,
}  # fmt: skip

every_gpu = pytest.mark.parametrize("gpu", device.GPUS, ids=lambda gpu: gpu.name)


@every_gpu
def test_fp32_peak_is_cores_times_clock(gpu: device.GPU) -> None:
    cores = gpu.num_sms * FP32_CORES.get(gpu.architecture.compute_capability, 128)
    assert gpu.peak("fp32") == pytest.approx(2 * cores * CLOCK[gpu.name] * 1e9, rel=0.02)


@every_gpu
def test_half_peak_is_a_power_of_two_an_sm_and_cycle(gpu: device.GPU) -> None:
    rate = gpu.peak("fp16") / (gpu.num_sms * CLOCK[gpu.name] * 1e9)
    # Hopper and Blackwell state tensor peaks at a clock up to 8 % below the boost clock of fp32.
    assert 0.91 <= rate / 2 ** round(math.log2(rate)) <= 1.02


@every_gpu
def test_peaks_exist_only_for_types_the_tensor_cores_multiply(gpu: device.GPU) -> None:
    multiplied = gpu.architecture.tensor_core.dtypes
    for dtype in device.ITEMSIZE:
        if dtype == "fp32":
            continue
        stated = getattr(gpu.peaks, dtype) is not None
        assert not stated or dtype in multiplied
        if dtype in ("fp16", "bf16", "fp8"):
            assert stated == (dtype in multiplied)


@every_gpu
def test_narrower_types_double_the_rate(gpu: device.GPU) -> None:
    if gpu.peaks.fp8 is not None:
        assert gpu.peaks.fp8 == pytest.approx(2 * gpu.peak("fp16"), rel=0.02)
    if gpu.peaks.fp4 is not None:
        assert gpu.peaks.fp4 >= 2 * gpu.peak("fp8")


@every_gpu
def test_limits_and_source(gpu: device.GPU) -> None:
    arch = gpu.architecture
    reserved = 1024 if arch.compute_capability >= (8, 0) else 0
    assert arch.shared_memory_per_sm - arch.shared_memory_per_block == reserved
    assert arch.registers_per_sm == 65536
    assert gpu.source
    m, n, k = arch.tensor_core.tile("fp16")
    assert m * n * k > 0
    assert (arch.tensor_memory_per_sm > 0) == (arch.compute_capability == (10, 0))


def test_table_spans_volta_to_blackwell() -> None:
    names = [gpu.architecture.name for gpu in device.GPUS]
    assert list(dict.fromkeys(names)) == ["Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell"]
    assert [gpu.architecture.tensor_core.generation for gpu in device.GPUS] == sorted(
        gpu.architecture.tensor_core.generation for gpu in device.GPUS
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("H200", "H200"),
        ("NVIDIA H200", "H200"),
        ("h100", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx5090", "RTX 5090"),
        ("Tesla T4", "T4"),
    ],
)
def test_find(name: str, expected: str) -> None:
    assert device.find(name).name == expected


def test_names_do_not_collide() -> None:
    for gpu in device.GPUS:
        assert all(device.find(name) is gpu for name in (gpu.name, *gpu.aliases))


@pytest.mark.parametrize("name", ["A10G", "H1000", "", "Radeon"])
def test_find_lists_the_known_names(name: str) -> None:
    with pytest.raises(InputError, match=r"gpu: got .*RTX 5090") as error:
        device.find(name)
    assert isinstance(error.value, (TilewiseError, ValueError))
    assert all(gpu.name in str(error.value) for gpu in device.GPUS)


def test_peak_says_what_is_missing() -> None:
    with pytest.raises(UnsupportedError, match="peaks stated for V100"):
        device.find("V100").peak("bf16")
    with pytest.raises(InputError, match="dtype"):
        device.find("V100").peak("float16")
    with pytest.raises(UnsupportedError, match="wgmma"):
        device.HOPPER.tensor_core.tile("fp4")


def test_ridge() -> None:
    h200 = device.find("H200")
    assert h200.ridge("bf16") == pytest.approx(989.4e12 / 4.8e12)


def test_current_follows_the_driver_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.current() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L40S")
    assert device.current() is device.find("L40S")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A10G")
    assert device.current() is None
