"""Where tokens stand in the pages of a key-value cache; data movement only."""

import jax
import jax.numpy as jnp


def token_slots(
    pages: jax.Array,
    positions: jax.Array,
    request: jax.Array,
    page_table: jax.Array,
    num_tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Each token's page and its slot in it, int32 [T].

    Padding goes to pages that do not exist, each token to its own: the places stay unique.
    """
    count, tokens_a_page = pages.shape[0], pages.shape[2]
    rows = jnp.minimum(request, page_table.shape[0] - 1)
    columns = jnp.minimum(positions // tokens_a_page, page_table.shape[1] - 1)
    index = jnp.arange(positions.shape[0], dtype=jnp.int32)
    page = jnp.where(index < num_tokens, page_table[rows, columns], count + index)
    return page, positions % tokens_a_page


def put(pages: jax.Array, new: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """pages [P, Nkv, Tp, Dh] with new [T, Nkv, Dh] at their (page, slot)."""
    return pages.at[page, :, slot].set(new, mode="drop", unique_indices=True)


def take(pages: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """What stands at each (page, slot), [T, Nkv, Dh]; zeros for pages that do not exist."""
    return pages.at[page, :, slot].get(mode="fill", fill_value=0)


def clear(pages: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """The pages with zeros at each (page, slot)."""
    none = jnp.zeros((), pages.dtype)
    return pages.at[page, :, slot].set(none, mode="drop", unique_indices=True)
