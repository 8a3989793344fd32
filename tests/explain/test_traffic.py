"""The comparison obeys the ladder's formulas and the orders of growth of the papers."""

import pytest

from tilewise.core.errors import InputError
from tilewise.explain import ladder, traffic


def test_rows_are_the_ladders_formulas() -> None:
    materialised, first, second = traffic.compare(512, 512, 64, fast_memory=8192)
    sizes = (512, 512, 64, 64)
    assert materialised.counts == ladder.rung("attention_materialised").closed_form(*sizes)
    assert first.counts == ladder.rung("flash_attention_1").closed_form(*sizes, fast_memory=8192)
    tile = traffic.query_tile(8192, 64)
    assert second.counts == ladder.rung("flash_attention_2").closed_form(*sizes, block_m=tile, block_n=16)
    assert (materialised.extra_elements, first.extra_elements, second.extra_elements) == (2 * 512 * 512, 1024, 512)
    assert materialised.bytes == 2 * materialised.counts.total


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("fast_memory", [8192, 49152, 100_000])
def test_query_tile_fits_and_is_the_largest(head_dim: int, fast_memory: int) -> None:
    def used(rows: int) -> int:
        return rows * (2 * head_dim + 16) + 2 * 16 * head_dim

    tile = traffic.query_tile(fast_memory, head_dim)
    assert used(tile) <= fast_memory < used(tile + 1)


def test_orders_of_growth() -> None:
    def total(index: int, seqlen: int, fast_memory: int) -> int:
        return traffic.compare(seqlen, seqlen, 64, fast_memory=fast_memory)[index].counts.total

    for index in (1, 2):  # quadratic in length, inverse in fast memory
        assert total(index, 65536, 16384) / total(index, 32768, 16384) == pytest.approx(4, rel=0.02)
        assert total(index, 65536, 16384) / total(index, 65536, 32768) == pytest.approx(2, rel=0.15)
    assert total(0, 65536, 16384) == total(0, 65536, 32768)
    assert total(2, 8192, 49152) < total(1, 8192, 49152) < total(0, 8192, 49152)


def test_causal_halves_the_second() -> None:
    full, causal = (traffic.compare(1 << 16, 1 << 16, 64, causal=causal)[2].counts.loads for causal in (False, True))
    assert causal / full == pytest.approx(0.5, abs=0.02)


def test_table_and_bad_input() -> None:
    text = traffic.table(traffic.compare(1024, 1024, 64))
    assert text.count("\n") == 3
    assert "1.0×" in text
    with pytest.raises(InputError, match="fast_memory"):
        traffic.compare(8, 8, 128, fast_memory=100)
