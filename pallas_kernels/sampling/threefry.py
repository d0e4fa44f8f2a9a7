"""Threefry-2x32 with 20 rounds on uint32 words (Salmon et al., SC 2011).

Written out because kernels, references and the host all need the same words; it equals JAX's
own threefry2x32 keys. Works on jax and NumPy arrays alike: integers only, exact in any program.
"""

from typing import Any

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(key0: Any, key1: Any, count0: Any, count1: Any) -> tuple[Any, Any]:
    """Encrypts the counter (count0, count1) under the key (key0, key1); uint32 arrays."""
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x, y = count0 + key0, count1 + key1
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << distance) | (y >> (32 - distance))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + (group + 1)
    return x, y


def fold_in(key_words: Any, data: Any) -> tuple[Any, Any]:
    """The words of `jax.random.fold_in`: key_words uint32 [..., 2], data uint32 [...]."""
    return threefry2x32(key_words[..., 0], key_words[..., 1], data ^ data, data)
