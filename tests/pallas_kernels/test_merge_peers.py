"""Sums by a kernel that writes into the peers' memory: where things lie, and what is refused.

What it computes is seen on cards only: scripts/bench_collectives.py and scripts/check_tp.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.pallas_kernels.merge import MergeTopology, fits_peers, peer_sum
from bi_jax.pallas_kernels.merge import peer_layout as at
from bi_jax.pallas_kernels.merge.hopper_peers import merge_peers_hopper
from bi_jax.pallas_kernels.merge.peer_layout import PeerLayout, pick_peer_schedule

MIB = 1 << 20


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_areas_follow_one_another(ranks):
    layout = PeerLayout(ranks=ranks)
    halves = 2 * ranks * at.SLOT
    assert ranks * 4 <= at.COUNT_AT < at.CONTROL
    assert layout.words == at.SHARE_CTAS * at.CONTROL
    assert layout.terms - layout.words == at.WORDS_CTAS * at.WORDS_ROUNDS * halves
    assert layout.shares - layout.terms == at.TERMS_CTAS * at.TERMS_ROUNDS * halves
    chunks = 2 * at.SHARE_CTAS * max(at.CHUNK_SLOTS, ranks) * at.SLOT
    assert layout.sums - layout.shares == layout.size - layout.sums == chunks
    assert all(a % 256 == 0 for a in (layout.words, layout.terms, layout.shares, layout.sums))


def test_counts_of_ranks_that_control_words_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="ranks=17 must be 2 to 16"):
        PeerLayout(ranks=17)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("elements", [4, 512, 4096, 32_768, 32_772, 4096 * 64, MIB // 2, 32 * MIB])
def test_schedules_cover_a_message_and_fit_the_slots(elements, ranks):
    schedule = pick_peer_schedule(elements=elements, ranks=ranks)
    if schedule.form == at.SHARES:  # a CTA takes chunks one after the other, at least one
        chunks = at.chunks_of(elements, ranks=ranks, rounds=schedule.rounds)
        assert chunks * ranks * schedule.rounds * 512 >= elements
        assert schedule.ctas == min(chunks, {2: 528, 4: 264, 8: 96}[ranks]) <= at.SHARE_CTAS
        assert ranks * schedule.rounds <= at.CHUNK_SLOTS
        return
    tile = {at.WORDS: 256, at.TERMS: 512}[schedule.form]
    assert schedule.ctas * schedule.rounds * tile >= elements
    assert schedule.ctas * (schedule.rounds - 1) * tile < elements
    most = {
        at.WORDS: (at.WORDS_CTAS, at.WORDS_ROUNDS),
        at.TERMS: (at.TERMS_CTAS, at.TERMS_ROUNDS),
    }[schedule.form]
    assert schedule.ctas <= most[0] and schedule.rounds <= most[1]


def test_a_form_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="too many for the form 'words'"):
        pick_peer_schedule(elements=MIB, ranks=4, form=at.WORDS)


@pytest.mark.parametrize("form", [at.WORDS, at.TERMS, at.SHARES])
@pytest.mark.parametrize("ranks", [2, 8])
def test_it_lowers_for_sm90_as_a_kernel_of_one_card(form, ranks):
    x = jax.ShapeDtypeStruct((3, 4096), jnp.float32)
    schedule = pick_peer_schedule(elements=x.size, ranks=ranks, form=form)
    kinds = dict(out_dtype="bfloat16", topology=MergeTopology(order="tree"), schedule=schedule)
    run = functools.partial(merge_peers_hopper, **kinds)
    table = jax.ShapeDtypeStruct((ranks + 1, 2), jnp.uint32)
    text = jax.jit(run).trace(x, table).lower(lowering_platforms=("cuda",)).as_text()
    assert "uses_xla_collective_metadata = false" in text and "multimem" not in text


def test_misfits_are_refused():
    table = jnp.zeros((5, 2), jnp.uint32)
    call = functools.partial(peer_sum, tree=False, backend="hopper")
    with pytest.raises(ValueError, match="x must be float32, got bfloat16"):
        call(jnp.zeros(8, jnp.bfloat16), table)
    with pytest.raises(ValueError, match="table must be uint32, got int32"):
        call(jnp.zeros(8), table.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"table must be \[ranks \+ 1, 2\], got \[5, 3\]"):
        call(jnp.zeros(8), jnp.zeros((5, 3), jnp.uint32))
    with pytest.raises(ValueError, match="a multiple of 4 elements"):
        call(jnp.zeros(6), table)
    with pytest.raises(NotImplementedError, match="reference"):
        peer_sum(np.zeros(8, np.float32), table, tree=False, backend="reference")
    assert not fits_peers((0,)) and not fits_peers((3, 2)) and fits_peers((3, 4))
