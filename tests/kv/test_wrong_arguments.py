"""Arguments of the KV cache that are of no such type, or name what is not there, end in InputError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from tilewise import kv, quant
from tilewise.core.errors import InputError

BY_CHANNEL = quant.encode_by_channel(torch.randn(3, 4, 2, 8), 4)


def given(x: Any) -> Any:
    """x, of whatever type."""
    return x


def pool(**options: Any) -> kv.PagePool:
    return kv.PagePool(1, 4, 4, 2, 8, dtype=torch.float32, **options)


def opened(pairs: Any, places: Any) -> None:
    found = pool(encoding="int8", keys_by_channel=4, open_pages=2)
    found.open(*(torch.tensor(x, dtype=torch.int32).view(-1, 2) for x in (pairs, places)))


def inserted(tokens: Any, extra: Any = None) -> None:
    pages = kv.PageAllocator(8, 4)
    index, sequence = kv.PrefixCache(pages), pages.create()
    pages.append(sequence, 6)
    index.insert(sequence, tokens, extra)


def cache() -> kv.KVCache:
    return kv.KVCache(1, 4, 4, 2, 8)


def written(tokens: int) -> None:
    found = cache()
    found.extend([found.new()], 2).write(0, *torch.zeros(2, tokens, 2, 8))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a page of ByChannel": (lambda: BY_CHANNEL.keys(torch.tensor([0, 3])), "pages"),
    "a negative page": (lambda: BY_CHANNEL.keys(torch.tensor([-1])), "pages"),
    "a page to open": (lambda: opened([4, 0], []), "opened"),
    "a row to open": (lambda: opened([0, 2], []), "opened"),
    "a page that moves": (lambda: opened([], [-1, 0]), "places"),
    "no tensor to open": (
        lambda: pool(encoding="int8", keys_by_channel=4, open_pages=2).open(given([1]), given(None)),
        "opened",
    ),
    "an unknown device": (lambda: kv.KVCache(1, 4, 4, 2, 8, device="nope"), "device"),
    "a number for a device": (lambda: kv.KVCache(1, 4, 4, 2, 8, device=given(3)), "device"),
    "a device that is not there": (lambda: kv.KVCache(1, 4, 4, 2, 8, device="cuda:77"), "device"),
    "no allocator": (lambda: kv.PrefixCache(given(3)), "allocator"),
    "no sequences": (lambda: kv.shared_prefixes(given(3)), "sequences"),
    "lists for sequences": (lambda: kv.shared_prefixes(given([[1, 2]])), "sequences"),
    "no codes": (lambda: quant.decode(given(torch.zeros(3))), "encoded"),
    "keys of more tokens than a batch has": (lambda: written(3), "k"),
    "tokens in floats": (lambda: cache().new([1.5]), "tokens"),
    "tokens that are flags": (lambda: cache().new([True, 2, 3]), "tokens"),
    "text among tokens": (lambda: cache().new([1, "a"]), "tokens"),
    "an unhashable extra": (lambda: cache().new([1], extra=[2]), "extra"),
    "floats to match": (lambda: kv.PrefixCache(kv.PageAllocator(8, 4)).match([1.0]), "tokens"),
    "floats to remember": (lambda: inserted([1, 2, 3, 4, 5.0]), "tokens"),
    "an extra to remember": (lambda: inserted([1], {}), "extra"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    call, argument = WRONG[name]
    with pytest.raises(InputError, match=f"^{argument}: got "):
        call()


def test_integers_of_other_types_are_tokens() -> None:
    inserted([numpy.int64(n) for n in range(5)])
    assert cache().new(range(9), extra=("adapter", 3)).length == 0
