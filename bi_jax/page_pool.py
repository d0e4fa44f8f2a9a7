"""Which pages of the cache are held, remembered or free. Host only, no jax."""

from collections import OrderedDict
from collections.abc import Callable, Iterable


class PagePool:
    """Hands out page ids and takes them back.

    A page may have several holders. One that nobody holds any more is free, unless its contents
    are remembered: then it is kept, and taken only when no free page is left, the one given back
    longest ago first.

    Which pages a sequence gets never changes a bit of it: attention reads through the page table.

    Args:
      num_pages: pages in the cache.
      on_evict: told the id of a remembered page before it is handed out to be overwritten.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] | None = None) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be positive")
        self.num_pages = num_pages
        self.on_evict = on_evict
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders: dict[int, int] = {}
        self._remembered: set[int] = set()
        self._kept: OrderedDict[int, None] = OrderedDict()  # longest ago first

    @property
    def num_free(self) -> int:
        """Pages that `take` can hand out, kept ones included."""
        return len(self._free) + len(self._kept)

    @property
    def num_held(self) -> int:
        return len(self._holders)

    @property
    def num_kept(self) -> int:
        """Pages without a holder whose contents are remembered."""
        return len(self._kept)

    def is_held(self, page: int) -> bool:
        return page in self._holders

    def take(self, count: int) -> list[int]:
        """`count` pages, each with one holder.

        Raises:
          ValueError: fewer are free; none is taken then.
        """
        if count > self.num_free:
            raise ValueError(f"expected {count} free pages, got {self.num_free}")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, page: int) -> None:
        """One more holder of a page that is held or kept.

        Raises:
          ValueError: it is neither.
        """
        if page in self._holders:
            self._holders[page] += 1
        elif page in self._kept:
            del self._kept[page]
            self._holders[page] = 1
        else:
            raise ValueError(f"page {page} is neither held nor kept")

    def give_back(self, pages: Iterable[int]) -> None:
        """Takes one holder away from each page.

        Raises:
          ValueError: a page has no holder (freed twice, or never taken).
        """
        for page in pages:
            if page not in self._holders:
                raise ValueError(f"page {page} is not in use and cannot be freed")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                if page in self._remembered:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def remember(self, page: int) -> None:
        """Keeps a held page's contents once its last holder is gone.

        Raises:
          ValueError: nobody holds it.
        """
        if page not in self._holders:
            raise ValueError(f"page {page} is not in use and cannot be remembered")
        self._remembered.add(page)

    def forget(self, page: int) -> None:
        """The contents are of no use any more; nothing happens to those who hold the page."""
        self._remembered.discard(page)
        if page in self._kept:
            del self._kept[page]
            self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        self._remembered.discard(page)
        if self.on_evict is not None:
            self.on_evict(page)
        return page
