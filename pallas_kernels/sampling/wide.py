"""Unsigned 64-bit integers as pairs of uint32 (high, low), since int64 is int32 in JAX.

Everything is exact, so sums may be made in any order.
"""

import jax
import jax.numpy as jnp

Wide = tuple[jax.Array, jax.Array]

LIMB_BITS = 20  # of the low limb of a weight
_HALF = 0xFFFF


def from_limbs(high_limb: jax.Array, low_limb: jax.Array) -> Wide:
    """high_limb * 2^20 + low_limb, both any uint32."""
    low = high_limb << LIMB_BITS
    return add((high_limb >> (32 - LIMB_BITS), low), (jnp.zeros_like(low), low_limb))


def add(a: Wide, b: Wide) -> Wide:
    low = a[1] + b[1]
    return a[0] + b[0] + (low < b[1]).astype(jnp.uint32), low


def subtract(a: Wide, b: Wide) -> Wide:
    return a[0] - b[0] - (a[1] < b[1]).astype(jnp.uint32), a[1] - b[1]


def less_equal(a: Wide, b: Wide) -> jax.Array:
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] <= b[1]))


def cumulative_sum(a: Wide) -> Wide:
    """Running sums along the only axis, of at most 2^16 values; the sums must stay below 2^64."""
    digits = jnp.stack([a[0], a[1] >> 16, a[1] & _HALF])
    high, middle, low = jnp.cumsum(digits, axis=1, dtype=jnp.uint32)
    middle = middle + (low >> 16)
    return high + (middle >> 16), (middle << 16) | (low & _HALF)


def multiply_32(a: jax.Array, b: jax.Array) -> Wide:
    """The 64-bit product of two uint32."""
    a0, a1, b0, b1 = a & _HALF, a >> 16, b & _HALF, b >> 16
    low, cross, high = a0 * b0, a1 * b0, a1 * b1
    middle = a0 * b1 + (cross & _HALF) + (low >> 16)  # at most 2^32 - 1
    return high + (cross >> 16) + (middle >> 16), (middle << 16) | (low & _HALF)


def multiply_high(a: Wide, b: Wide) -> Wide:
    """floor(a * b / 2^64)."""
    zero = jnp.zeros_like(a[1])
    carry, _ = multiply_32(a[1], b[1])
    first = add(multiply_32(a[0], b[1]), (zero, carry))
    second = add(multiply_32(a[1], b[0]), (zero, first[1]))
    high = add(multiply_32(a[0], b[0]), (zero, first[0]))
    return add(high, (zero, second[0]))


def multiply_fraction_up(a: Wide, fraction: jax.Array) -> Wide:
    """ceil(a * fraction / 2^32) for a uint32 fraction."""
    zero = jnp.zeros_like(fraction)
    carry, rest = multiply_32(a[1], fraction)
    return add(
        add(multiply_32(a[0], fraction), (zero, carry)), (zero, (rest != 0).astype(jnp.uint32))
    )
