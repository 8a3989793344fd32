"""What a cache says of itself and of mistakes: in names that its user can call."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import tilewise as tw
from tilewise.errors import InputError, OutOfPagesError, TilewiseError


def _cache(**more: object) -> tw.KVCache:
    return tw.KVCache(2, 8, 16, 2, 64, **more)  # type: ignore[arg-type]


def test_a_cache_shows_pages_sequences_encoding_and_device() -> None:
    cache = _cache()
    sequence = cache.new()
    cache.extend([sequence], 20)
    cache.fork(sequence)
    rest = "cached of 8, page_size: 16, sequences: {}, layers: 2, bfloat16, cpu)"
    assert repr(cache) == "KVCache(pages: 2 used and 0 " + rest.format(2)
    cache.remember(sequence, range(16))
    for one in cache.allocator.sequences:
        cache.free(one)
    assert repr(cache) == "KVCache(pages: 0 used and 1 " + rest.format(0)
    assert "int4" in repr(_cache(encoding="int4"))
    assert "keys int2, values int8" in repr(_cache(encoding="int8", keys_by_channel=2, open_pages=1))
    assert "float32" in repr(_cache(dtype=torch.float32))


def _freed(cache: tw.KVCache) -> None:
    sequence = cache.new()
    cache.free(sequence)
    cache.extend([sequence], 1)


MISTAKES: dict[str, Callable[[tw.KVCache], object]] = {
    "a freed sequence": _freed,
    "a sequence of another cache": lambda cache: cache.fork(_cache().new()),
    "a number for a sequence": lambda cache: cache.extend([3], 1),  # type: ignore[list-item]
    "one sequence twice": lambda cache: cache.extend([cache.new()] * 2, 1),
    "a negative count": lambda cache: cache.extend([cache.new()], -1),
    "too few counts": lambda cache: cache.extend([cache.new(), cache.new()], [1]),
    "longer by truncation": lambda cache: cache.truncate(cache.new(), 4),
    "more tokens than there are": lambda cache: cache.remember(cache.new(), [1, 2]),
    "too many tokens": lambda cache: cache.extend([cache.new()], 1000),
    "text for tokens": lambda cache: cache.new("text"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_message_names_what_a_user_of_the_cache_can_call(name: str) -> None:
    with pytest.raises(TilewiseError) as error:
        MISTAKES[name](_cache())
    assert isinstance(error.value, OutOfPagesError if name == "too many tokens" else InputError)
    told = set(re.findall(r"\b(create|append|insert|start|append_all)\b", error.value.hint))
    of_allocator = set(re.findall(r"PageAllocator\.(\w+)", error.value.hint))
    assert told <= of_allocator, error.value.hint
    for method in re.findall(r"KVCache\.(\w+)", error.value.hint):
        assert hasattr(tw.KVCache, method)
    for method in of_allocator:
        assert hasattr(tw.kv.PageAllocator, method)
