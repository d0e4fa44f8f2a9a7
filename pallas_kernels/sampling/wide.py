"""Unsigned 64-bit integers as pairs of uint32 (high, low), since int64 is int32 in JAX.

Everything is exact, so sums may be made in any order.
"""

import jax
import jax.numpy as jnp

Wide = tuple[jax.Array, jax.Array]

LIMB_BITS = 20  # of the low limb of a weight
_LIMB = 2**LIMB_BITS - 1
_HALF = 0xFFFF


def to_digits(high_limb: jax.Array, low_limb: jax.Array) -> jax.Array:
    """high_limb * 2^20 + low_limb, uint32 [...] each below 2^31 -> digits of base 2^20, [3, ...].

    Up to 2^12 of them can be added digit by digit.
    """
    high = high_limb + (low_limb >> LIMB_BITS)
    return jnp.stack([high >> LIMB_BITS, high & _LIMB, low_limb & _LIMB])


def from_digits(digits: jax.Array) -> Wide:
    """The value of (sums of) digits [3, ...], below 2^64."""
    middle = digits[1] + (digits[2] >> LIMB_BITS)
    high = digits[0] + (middle >> LIMB_BITS)
    low = (middle << LIMB_BITS) | (digits[2] & _LIMB)
    return (high << (2 * LIMB_BITS - 32)) | ((middle & _LIMB) >> (32 - LIMB_BITS)), low


def add(a: Wide, b: Wide) -> Wide:
    low = a[1] + b[1]
    return a[0] + b[0] + (low < b[1]).astype(jnp.uint32), low


def subtract(a: Wide, b: Wide) -> Wide:
    return a[0] - b[0] - (a[1] < b[1]).astype(jnp.uint32), a[1] - b[1]


def less_equal(a: Wide, b: Wide) -> jax.Array:
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] <= b[1]))


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
