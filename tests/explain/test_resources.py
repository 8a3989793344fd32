"""The budget model agrees with the tiles that FlashAttention-2 and -3 chose, and rejects those they avoided."""

import pytest

from tilewise.core.errors import InputError
from tilewise.explain.resources import RESERVE, Tile, budget, fitting, register_limit

FA3 = {"producer_warps": 4, "overlap": True}


@pytest.mark.parametrize(
    ("gpu", "tile"),
    [
        # FlashAttention-2, A100 (flash_fwd_launch_template.h): block_m × block_n × warps, one k and one v tile
        ("A100", Tile(128, 128, 64, warps=4, stages=1)),
        ("A100", Tile(128, 64, 128, warps=4, stages=1)),
        ("A100", Tile(128, 64, 256, warps=8, stages=1)),
        ("RTX 3090", Tile(128, 32, 128, warps=4, stages=1)),
        # FlashAttention-3, H100 (hopper/tile_size.h): two or three consumer warpgroups and one producer
        ("H100", Tile(192, 192, 64, warps=12, p_in_shared=True, **FA3)),
        ("H100", Tile(192, 144, 96, warps=12, p_in_shared=True, **FA3)),
        ("H100", Tile(128, 176, 128, warps=8, **FA3)),
        ("H100", Tile(128, 80, 256, warps=8, **FA3)),
    ],
)
def test_published_tiles_fit(gpu: str, tile: Tile) -> None:
    result = budget(tile, gpu)
    assert result.fits, result.unmet
    assert result.blocks_per_sm >= 1


@pytest.mark.parametrize(
    ("gpu", "tile", "why"),
    [
        ("A100", Tile(128, 128, 128, warps=4, stages=1), "registers"),
        # With P in registers; FlashAttention-3 puts it in shared memory at this size.
        ("H100", Tile(192, 192, 64, warps=12, **FA3), "registers"),
        ("H100", Tile(128, 224, 128, warps=8, **FA3), "shared memory"),
        ("RTX 4090", Tile(128, 64, 256, warps=8, stages=1), "shared memory"),
        ("T4", Tile(64, 64, 64), "do not multiply bf16"),
        ("A100", Tile(64, 64, 64, dtype="fp8"), "do not multiply fp8"),
        ("A100", Tile(64, 64, 64, producer_warps=4), "Hopper"),
        ("B200", Tile(256, 128, 256, dtype="fp8", warps=8, stages=1), "tensor memory"),
        ("H100", Tile(64, 32, 64, warps=36), "threads"),
    ],
)
def test_what_does_not_fit_says_why(gpu: str, tile: Tile, why: str) -> None:
    result = budget(tile, gpu)
    assert not result.fits
    assert why in result.unmet
    assert result.blocks_per_sm == 0
    assert why in str(result)


def test_arithmetic() -> None:
    tile = Tile(128, 64, 128, stages=2, warps=4)
    assert tile.shared_bytes == 2 * (128 * 128 + 2 * 64 * 256)
    assert tile.registers() == (128 * 128 + 128 * 64) // 128
    assert tile.registers(tensor_memory=True) == 128 * 64 // 128
    assert Tile(128, 64, 128, overlap=True).registers() == tile.registers() + 128 * 64 // 2 // 128
    assert Tile(128, 64, 128, overlap=True, p_in_shared=True).registers() == tile.registers()
    assert Tile(128, 64, 128, q_in_registers=True).shared_bytes == tile.shared_bytes - 2 * 128 * 128
    assert Tile(128, 64, 128, q_in_registers=True).registers() == tile.registers() + 128 * 128 // 2 // 128


def test_register_limits_of_flash_attention_3() -> None:
    h100 = budget(Tile(64, 64, 64), "H100").gpu
    assert register_limit(Tile(64, 64, 64, warps=4, producer_warps=4), h100) == 255
    assert register_limit(Tile(64, 64, 64, warps=8, producer_warps=4), h100) == 240
    assert register_limit(Tile(64, 64, 64, warps=12, producer_warps=4), h100) == 160
    assert register_limit(Tile(64, 64, 64, warps=16), h100) == 128
    assert register_limit(Tile(64, 64, 64, warps=12), h100) == 168  # 170 rounded down to a multiple of 8


def test_occupancy() -> None:
    small = budget(Tile(64, 32, 64, stages=1, warps=4), "A100")
    registers = -(-(small.registers + RESERVE) // 8) * 8
    shared, threads = small.shared_bytes + 1024, 128
    assert small.blocks_per_sm == min(164 * 1024 // shared, 65536 // (registers * threads), 2048 // threads, 32)
    assert small.blocks_per_sm > budget(Tile(64, 32, 64, stages=4, warps=4), "A100").blocks_per_sm


def test_fitting_lists_only_what_fits() -> None:
    results = list(fitting("L4", 128))
    assert results
    assert all(result.fits for result in results)
    assert [result.tile.block_m for result in results] == sorted((r.tile.block_m for r in results), reverse=True)
    assert not list(fitting("T4", 64, dtype="bf16"))


def test_bad_input() -> None:
    with pytest.raises(InputError, match="stages"):
        Tile(64, 64, 64, stages=0)
    with pytest.raises(InputError, match="dtype"):
        Tile(64, 64, 64, dtype="half")
    with pytest.raises(InputError, match="producer_warps"):
        Tile(64, 64, 64, producer_warps=-1)
