"""A step's arrays say where every token belongs, and hold nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bi_jax.batch import bucket_for, first_rows, token_arrays
from bi_jax.scheduler import PlannedSequence, Sequence, StepPlan

PAGE, TABLE_ROWS, TABLE_COLUMNS = 4, 8, 6


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Parts of a few sequences, each on pages of its own."""
    items, pages = [], draw(st.permutations(range(48)))
    for index in range(draw(st.integers(1, TABLE_ROWS))):
        length = draw(st.integers(1, 24))
        start = draw(st.integers(0, length - 1))
        count = draw(st.integers(1, length - start))
        used = -(-(start + count) // PAGE)
        ids = [1000 * (index + 1) + place for place in range(length)]
        items.append(
            PlannedSequence(
                sequence=Sequence(seq_id=index, token_ids=ids, num_computed=start),
                start=start,
                count=count,
                pages=tuple(pages[6 * index : 6 * index + used]),
            )
        )
    return StepPlan(items=tuple(items))


@given(plan=plans(), room=st.integers(0, 9))
def test_every_token_is_where_the_arrays_say(plan: StepPlan, room: int):
    arrays = token_arrays(
        plan,
        num_rows=plan.num_tokens + room,
        num_requests=TABLE_ROWS,
        pages_a_request=TABLE_COLUMNS,
    )
    assert arrays.num_tokens == plan.num_tokens
    for name in ("tokens", "positions", "request", "query_start", "page_table", "num_tokens"):
        assert getattr(arrays, name).dtype == np.int32
    for row, item, first in first_rows(plan):
        assert arrays.query_start[row] == first
        assert arrays.query_start[row + 1] == first + item.count
        for offset in range(item.count):
            flat, place = first + offset, item.start + offset
            assert arrays.tokens[flat] == item.sequence.token_ids[place]
            assert arrays.positions[flat] == place
            assert arrays.request[flat] == row
            assert arrays.page_table[row, place // PAGE] == item.pages[place // PAGE]
    assert (arrays.query_start[len(plan.items) :] == plan.num_tokens).all()
    padding = slice(plan.num_tokens, None)
    assert not arrays.tokens[padding].any() and not arrays.positions[padding].any()


@given(rows=st.integers(0, 64))
def test_the_smallest_bucket_is_taken(rows: int):
    assert bucket_for(rows, (8, 24, 64)) == min(b for b in (8, 24, 64) if b >= rows)


def test_more_rows_than_any_bucket_are_refused():
    with pytest.raises(ValueError, match="at most 64 rows in a step, got 65"):
        bucket_for(65, (8, 64))


def test_a_part_that_ends_with_the_last_known_token_draws():
    sequence = Sequence(seq_id=0, token_ids=[1, 2, 3, 4, 5], num_computed=2)
    whole = PlannedSequence(sequence=sequence, start=2, count=3, pages=(0, 1))
    part = PlannedSequence(sequence=sequence, start=2, count=2, pages=(0,))
    assert whole.draws and not part.draws
    assert sequence.num_behind == 3
