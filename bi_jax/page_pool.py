"""Which pages of the cache are free. Host only, no jax."""

from collections.abc import Iterable


class PagePool:
    """Hands out page ids and takes them back; lowest ids first.

    Which pages a sequence gets never changes a bit of it: attention reads through the page table.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be positive")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages.

        Raises:
          ValueError: fewer are free; none is taken then.
        """
        if count > len(self._free):
            raise ValueError(f"expected {count} free pages, got {len(self._free)}")
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Returns pages.

        Raises:
          ValueError: a page is not in use (freed twice, or never taken).
        """
        for page in pages:
            if page not in self._used:
                raise ValueError(f"page {page} is not in use and cannot be freed")
            self._used.remove(page)
            self._free.append(page)
