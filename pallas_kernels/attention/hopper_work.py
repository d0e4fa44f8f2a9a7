"""The work list of the Hopper attention kernel: query tiles cut from a ragged batch."""

import jax
import jax.numpy as jnp

# Columns of the tile table.
REQUEST, FIRST_ROW, BEGIN, END, POSITION, CONTEXT, SPLIT, COUNT = range(8)
ALIGN = 8  # a tile starts at a multiple of this flat row: the tile of the shared-memory layout
AT_ONCE = 8  # tiles that all run at once, in whatever order
FEW = 512  # requests


def max_tiles(tokens: int, requests: int, tile_tokens: int) -> int:
    """Static bound on the tiles: a request adds at most one partial tile at each of its ends."""
    return min(tokens, (tokens + requests * (tile_tokens + ALIGN - 2)) // tile_tokens)


def make_tiles(batch, *, tokens: int, tile_tokens: int) -> jax.Array:
    """Cuts each request's query tokens into tiles of at most `tile_tokens`, longest context first.

    Args:
      batch: a RaggedBatch (positions int32[T], query_start int32[B + 1], num_tokens int32[]).
      tokens: T.
      tile_tokens: rows of the flat batch that a tile covers.

    Returns:
      tiles int32[N, 8], one row a tile: request, first flat row (a multiple of 8, perhaps before
      the request, unless a tile is one row), the tile's rows [begin, end) that are the request's,
      position of row 0 (perhaps negative), how many keys the request has once the whole batch is in
      its pages, a range of keys (see `split_tiles`), and in every row how many tiles are in use.
      The others, behind them, are empty.

    Invariance: only integers are added; the order of tiles decides when a query is computed, never
    how.
    """
    ends = jnp.minimum(batch.query_start[1:], batch.num_tokens)
    starts = jnp.minimum(batch.query_start[:-1], ends)
    requests = starts.shape[0]
    number = max_tiles(tokens, requests, tile_tokens)
    bases = starts if tile_tokens == 1 else starts // ALIGN * ALIGN
    tiles_of = jnp.where(ends > starts, (ends - bases + tile_tokens - 1) // tile_tokens, 0)
    tile_end = _running_sum(tiles_of)
    index = jnp.arange(number, dtype=jnp.int32)
    request = jnp.sum(tile_end[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    used = request < requests
    request = jnp.minimum(request, requests - 1)
    first = bases[request] + (index - (tile_end - tiles_of)[request]) * tile_tokens
    first = jnp.where(used, first, 0)
    begin = jnp.maximum(starts[request] - first, 0)
    end = jnp.where(used, jnp.minimum(ends[request] - first, tile_tokens), 0)
    position = batch.positions[jnp.minimum(first + begin, tokens - 1)] - begin
    context = batch.positions[jnp.maximum(ends[request] - 1, 0)] + 1
    split = jnp.zeros_like(request)
    count = jnp.broadcast_to(jnp.sum(tiles_of, dtype=jnp.int32), request.shape)
    table = jnp.stack([request, first, begin, end, position, context, split, count], axis=1)
    if number > AT_ONCE:
        # Longest first evens out the CTAs; empty tiles sort behind all others.
        order = jnp.argsort(jnp.where(used, -(position + end), 1), stable=True)
        table = table[order]
    return table.astype(jnp.int32)


def _running_sum(counts: jax.Array) -> jax.Array:
    """int32 [B] -> the sums up to each entry; few in one small kernel where a scan is several."""
    if len(counts) > FEW:
        return jnp.cumsum(counts)
    place = jnp.arange(len(counts))
    before = place[:, None] >= place[None, :]
    return jnp.sum(jnp.where(before, counts[None, :], 0), axis=1, dtype=jnp.int32)


def split_tiles(tiles: jax.Array, *, kv_split: int, splits: int, window: int | None) -> jax.Array:
    """Repeats every tile for each range of `kv_split` keys in which one of its queries sees some.

    Args:
      tiles: int32 [N, 8] of `make_tiles`.
      kv_split: keys of a range, at absolute multiples.
      splits: ranges at most.
      window: keys a query sees, or None.

    Returns:
      table int32 [N * splits, 8] with the range in column SPLIT, those in use first and their
      number in column COUNT.
    """
    number = tiles.shape[0]
    split = jnp.arange(splits, dtype=jnp.int32)[None, :]
    begin, end, position = (tiles[:, field, None] for field in (BEGIN, END, POSITION))
    used = (end > begin) & (split * kv_split < position + end)
    if window is not None:
        used &= (split + 1) * kv_split > position + begin - (window - 1)
    table = jnp.repeat(tiles, splits, axis=0).at[:, SPLIT].set(jnp.tile(split[0], number))
    order = jnp.argsort(jnp.logical_not(used).reshape(-1), stable=True)
    return table[order].at[:, COUNT].set(jnp.sum(used, dtype=jnp.int32))


def token_places(tiles: jax.Array, *, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Finds each flat token's tile and its row in the tile, both int32 [T]."""
    token = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    first, begin, end = (tiles[None, :, field] for field in (FIRST_ROW, BEGIN, END))
    inside = (token >= first + begin) & (token < first + end)
    tile = jnp.argmax(inside, axis=1).astype(jnp.int32)
    return tile, token[:, 0] - tiles[tile, FIRST_ROW]
