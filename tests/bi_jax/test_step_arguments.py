"""A step's arrays as one array of words, and back inside the program."""

import functools

import jax
import numpy as np

from bi_jax.batch import TokenArrays
from bi_jax.request import SamplingParams
from bi_jax.sampling_rows import row_sampling, stack_rows
from bi_jax.step_arguments import LogitRows, StepArguments, pack, unpack

TOKENS, REQUESTS, PAGES, ROWS = 7, 3, 5, 4


def a_step() -> StepArguments:
    rng = np.random.default_rng(0)

    def integers(*shape: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, shape, np.int32)

    kinds = (
        dict(temperature=0.7, top_k=5, top_p=0.3, min_p=0.1, logprobs_mode="processed"),
        dict(temperature=0.0),
    )
    sampling = [row_sampling(SamplingParams(seed=2**40 + 3, **k), sample_index=1) for k in kinds]
    return StepArguments(
        tokens=TokenArrays(
            tokens=integers(TOKENS),
            positions=integers(TOKENS),
            request=integers(TOKENS),
            query_start=integers(REQUESTS + 1),
            page_table=integers(REQUESTS, PAGES),
            num_tokens=np.asarray(6, np.int32),
        ),
        rows=LogitRows(
            row=integers(ROWS),
            target=integers(ROWS),
            num_rows=np.asarray(2, np.int32),
            sampling=stack_rows(sampling, [9, 2**31 - 1], size=ROWS),
        ),
        top=0,
        filters=True,
        steps=1,
    )


def test_every_array_comes_back_bit_for_bit():
    step = a_step()
    sizes = dict(num_tokens=TOKENS, num_requests=REQUESTS, pages_a_request=PAGES, logit_rows=ROWS)
    batch, rows = jax.jit(functools.partial(unpack, **sizes))(pack(step))
    for name, array in vars(batch).items():
        expected = getattr(step.tokens, name)
        assert array.dtype == expected.dtype, name
        np.testing.assert_array_equal(array, expected, err_msg=name)
    for got, expected in zip(jax.tree.leaves(rows), jax.tree.leaves(step.rows), strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


def test_a_view_of_other_strides_is_packed_by_its_values():
    step = a_step()
    wide = np.repeat(step.tokens.positions, 2)[::2]
    object.__setattr__(step.tokens, "positions", wide)
    np.testing.assert_array_equal(pack(step)[:TOKENS].view(np.int32), wide)
