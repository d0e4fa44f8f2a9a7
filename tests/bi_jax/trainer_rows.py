"""Completions as a trainer's padded rows, with what was emitted while they were sampled."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bi_jax import RequestOutput


class Rows(NamedTuple):
    """[B, T] each: ids, 1 where there is a token, where it was drawn, and what was emitted."""

    tokens: np.ndarray
    mask: np.ndarray
    drawn: np.ndarray
    emitted: np.ndarray

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput], length: int, side: str) -> "Rows":
        """The outputs' first completions, padded on the "left" or on the right."""
        shape = (len(outputs), length)
        rng = np.random.default_rng(6)
        tokens = rng.integers(0, 100, shape).astype(np.int32)  # padding holds anything
        mask, drawn = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
        emitted = np.zeros(shape, np.float32)
        for row, output in enumerate(outputs):
            prompt, completion = output.prompt_token_ids, output.outputs[0]
            end = len(prompt) + len(completion.token_ids)
            start = length - end if side == "left" else 0
            place, new = slice(start, start + end), slice(start + len(prompt), start + end)
            tokens[row, place] = [*prompt, *completion.token_ids]
            mask[row, place], drawn[row, new] = 1, True
            emitted[row, new] = completion.logprobs
        return cls(tokens, mask, drawn, emitted)

    def micro(self, start: int, count: int) -> "Rows":
        return Rows(*(a[start : start + count] for a in self))
