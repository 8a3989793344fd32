"""Where keys and values of many sequences are kept: pages in memory, who holds them, and prefixes found again."""

from tilewise.kv.allocator import PageAllocator
from tilewise.kv.cache import Batch, KVCache
from tilewise.kv.pool import PagePool
from tilewise.kv.prefix import PrefixCache, SharedPrefix, shared_prefixes
from tilewise.kv.sequence import Sequence, Write

__all__ = [
    "Batch",
    "KVCache",
    "PageAllocator",
    "PagePool",
    "PrefixCache",
    "Sequence",
    "SharedPrefix",
    "Write",
    "shared_prefixes",
]
