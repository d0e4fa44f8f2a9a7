"""Which pages already hold the keys of a given beginning of a sequence. Host only, no jax.

A page is known by a chain of SHA-256 over the token ids of all pages up to it, the page size and
the weights' version. Only full pages are known. Keys and values of a position depend on the tokens
up to it and on the weights alone, to the bit, so a page computed for one sequence is a page
computed for every sequence that begins alike: a hit and a miss cannot be told apart by bits.
"""

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from .page_pool import PagePool


class PrefixCache:
    """Finds pages by what they hold; least recently used ones are given up first.

    Args:
      pool: the pages; the cache remembers them there and is told of evictions.
      page_size: tokens a page.
    """

    def __init__(self, pool: PagePool, *, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._root = b""
        self.weights_version = 0
        pool.on_evict = self._drop
        self.clear(weights_version=0)

    def __len__(self) -> int:
        return len(self._pages)

    def extend_keys(self, keys: list[bytes], token_ids: Sequence[int]) -> None:
        """Appends to a sequence's keys those of its full pages that have none yet.

        Args:
          keys: of the first len(keys) pages of the same tokens.
          token_ids: the whole sequence.
        """
        size = self._page_size
        for page in range(len(keys), len(token_ids) // size):
            ids = np.array(token_ids[page * size : (page + 1) * size], "<i4")
            keys.append(sha256((keys[-1] if keys else self._root) + ids.tobytes()).digest())

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest beginning that is known; nothing is held by that."""
        pages = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def add(self, key: bytes, page: int) -> None:
        """Makes a held, fully computed page known. The first page of a key stays the one."""
        if key not in self._pages and page not in self._keys:
            self._pages[key] = page
            self._keys[page] = key
            self._pool.remember(page)

    def forget(self, page: int) -> None:
        """Makes a page unknown, if it is known."""
        if page in self._keys:
            self._drop(page)
            self._pool.forget(page)

    def clear(self, *, weights_version: int) -> None:
        """Forgets every page; what is added from now on belongs to these weights."""
        for page in list(self._keys):
            self.forget(page)
        self.weights_version = weights_version
        name = f"bi_jax prefix; page_size={self._page_size}; weights_version={weights_version}"
        self._root = sha256(name.encode()).digest()

    def _drop(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
