"""Traffic between fast and slow memory of one head, algorithm by algorithm, in closed form at any size.

The formulas are those of the ladder, where the same algorithms run and are counted; here they are evaluated at sizes
that nobody would run in NumPy. All algorithms get the same fast memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.core.errors import InputError
from tilewise.explain import ladder
from tilewise.explain.ladder.slow_memory import Counts


@dataclass(frozen=True)
class Traffic:
    """Elements and bytes one algorithm moves for one head, and what it keeps in slow memory beside q, k, v and o."""

    algorithm: str
    counts: Counts
    itemsize: float
    extra_elements: int

    @property
    def bytes(self) -> int:
        """Bytes moved in both directions."""
        return int(self.counts.total * self.itemsize)


def query_tile(fast_memory: int, head_dim: int, block_n: int = 16) -> int:
    """Query rows of a FlashAttention-2 tile that fits beside its k and v tiles: each needs a row of q, of acc and of s.

    Raises InputError where not even one row fits.
    """
    tile = (fast_memory - 2 * block_n * head_dim) // (2 * head_dim + block_n)
    if tile < 1:
        least = 2 * head_dim * (block_n + 1) + block_n
        expected = f"at least {least} elements, one query row"
        raise InputError("fast_memory", got=fast_memory, expected=expected, hint="or a smaller head_dim")
    return tile


def compare(
    seqlen_q: int, seqlen_k: int, head_dim: int, *, fast_memory: int = 49152, itemsize: float = 2, causal: bool = False
) -> tuple[Traffic, ...]:
    """Materialised attention, FlashAttention-1 and FlashAttention-2 on one head (head_dim_v = head_dim).

    FlashAttention-1 takes its own block rule; FlashAttention-2 spends the same memory on `query_tile` rows of queries.

    Args:
        seqlen_q, seqlen_k, head_dim: sizes in elements.
        fast_memory: elements of on-chip memory one tile may use; the default is 96 KiB of 16-bit numbers.
        itemsize: bytes of an element, the same for every tensor.
        causal: let FlashAttention-2 skip the tiles above the diagonal; the others compute all pairs.

    Returns:
        A `Traffic` for each of the three.

    Raises:
        InputError: not even one query row fits into the fast memory.

    Example:
        >>> from tilewise.explain import traffic
        >>> [round(row.bytes / 1e6) for row in traffic.compare(8192, 8192, 64)]  # MB
        [541, 141, 57]
    """
    sizes = (seqlen_q, seqlen_k, head_dim, head_dim)
    tile = query_tile(fast_memory, head_dim)
    rows = {
        "materialised": (_formula("attention_materialised", sizes), 2 * seqlen_q * seqlen_k),
        "FlashAttention-1": (_formula("flash_attention_1", sizes, fast_memory=fast_memory), 2 * seqlen_q),
        "FlashAttention-2": (
            _formula("flash_attention_2", sizes, block_m=tile, block_n=16, causal=causal),
            seqlen_q,
        ),
    }
    return tuple(Traffic(name, counts, itemsize, extra) for name, (counts, extra) in rows.items())


def _formula(rung: str, sizes: tuple[int, ...], **options: int) -> Counts:
    counts: Counts = ladder.rung(rung).closed_form(*sizes, **options)
    return counts


def table(rows: tuple[Traffic, ...]) -> str:
    """The comparison as plain text, each row against the first."""
    lines = [f"{'algorithm':<20}{'loads':>16}{'stores':>16}{'MB':>12}{'ratio':>9}{'extra elements':>18}"]
    for row in rows:
        ratio = rows[0].bytes / row.bytes
        lines.append(
            f"{row.algorithm:<20}{row.counts.loads:>16,}{row.counts.stores:>16,}{row.bytes / 1e6:>12,.2f}"
            f"{ratio:>8.1f}×{row.extra_elements:>18,}"
        )
    return "\n".join(lines)
