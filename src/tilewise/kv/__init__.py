"""Where keys and values of many sequences are kept: pages with reference counts, and prefixes that are found again."""

from tilewise.kv.allocator import PageAllocator, Sequence, Write
from tilewise.kv.prefix import PrefixCache, SharedPrefix, shared_prefixes

__all__ = ["PageAllocator", "PrefixCache", "Sequence", "SharedPrefix", "Write", "shared_prefixes"]
