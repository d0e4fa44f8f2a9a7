"""A page is found by all of the tokens up to its end, under the weights that computed it."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bi_jax.page_pool import PagePool
from bi_jax.prefix_cache import PrefixCache

SIZE = 3


def cache_with(*sequences: list[int]) -> tuple[PrefixCache, PagePool, list[list[int]]]:
    pool = PagePool(64)
    cache = PrefixCache(pool, page_size=SIZE)
    held = []
    for tokens in sequences:
        keys: list[bytes] = []
        cache.extend_keys(keys, tokens)
        pages = pool.take(len(keys))
        for key, page in zip(keys, pages, strict=True):
            cache.add(key, page)
        held.append(pages)
    return cache, pool, held


def found(cache: PrefixCache, tokens: list[int]) -> list[int]:
    keys: list[bytes] = []
    cache.extend_keys(keys, tokens)
    return cache.find(keys)


@given(
    a=st.lists(st.integers(0, 1), max_size=14),
    b=st.lists(st.integers(0, 1), max_size=14),
)
def test_as_many_pages_are_found_as_full_pages_agree(a: list[int], b: list[int]):
    cache, _, (pages,) = cache_with(a)
    agree = 0
    while agree < min(len(a), len(b)) and a[agree] == b[agree]:
        agree += 1
    assert found(cache, b) == pages[: agree // SIZE]


def test_the_same_page_after_another_beginning_is_another_page():
    cache, _, (pages, others) = cache_with([1, 1, 1, 7, 7, 7], [2, 2, 2, 7, 7, 7])
    assert found(cache, [1, 1, 1, 7, 7, 7]) == pages
    assert found(cache, [2, 2, 2, 7, 7, 7]) == others
    assert found(cache, [7, 7, 7]) == []


def test_keys_are_a_chain_of_sha256_over_tokens_and_weights_version():
    cache, _, _ = cache_with([1, 2, 3, 4, 5, 6])
    keys: list[bytes] = []
    cache.extend_keys(keys, [1, 2, 3, 4, 5, 6, 7])
    root = hashlib.sha256(b"bi_jax prefix; page_size=3; weights_version=0").digest()
    first = hashlib.sha256(root + np.array([1, 2, 3], "<i4").tobytes()).digest()
    second = hashlib.sha256(first + np.array([4, 5, 6], "<i4").tobytes()).digest()
    assert keys == [first, second]
    longer = list(keys)
    cache.extend_keys(longer, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert longer[:2] == keys and len(longer) == 3


def test_clear_forgets_all_and_new_weights_have_keys_of_their_own():
    tokens = [1, 2, 3, 4, 5, 6]
    cache, pool, (pages,) = cache_with(tokens)
    old: list[bytes] = []
    cache.extend_keys(old, tokens)
    pool.give_back(pages)
    assert pool.num_kept == 2
    cache.clear(weights_version=1)
    assert len(cache) == 0 and pool.num_kept == 0 and pool.num_free == 64
    assert found(cache, tokens) == []
    new: list[bytes] = []
    cache.extend_keys(new, tokens)
    assert not set(old) & set(new)


def test_an_evicted_page_is_not_found():
    tokens = [1, 2, 3, 4, 5, 6]
    cache, pool, (pages,) = cache_with(tokens)
    pool.give_back(reversed(pages))  # the last page is given up first
    pool.take(pool.num_free - 1)
    assert found(cache, tokens) == pages[:1]
    pool.take(1)
    assert found(cache, tokens) == [] and len(cache) == 0


def test_the_first_page_of_a_key_stays_the_one():
    tokens = [1, 2, 3]
    cache, pool, (first, second) = cache_with(tokens, tokens)
    assert first != second and found(cache, tokens) == first
    pool.give_back(second)
    assert pool.num_kept == 0  # nothing is known by it
    cache.forget(second[0])
    assert found(cache, tokens) == first
    cache.forget(first[0])
    assert found(cache, tokens) == []
