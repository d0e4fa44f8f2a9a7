"""The schedule table of the Hopper attention kernel."""

import pytest

from bi_jax.pallas_kernels.attention.schedule import Schedule, schedule_for, warpgroup_tokens


def test_schedule_says_what_is_wrong():
    with pytest.raises(ValueError, match="consumers=3"):
        Schedule(consumers=3)
    with pytest.raises(ValueError, match="stages=1"):
        Schedule(stages=1)
    with pytest.raises(ValueError, match="half_rows"):
        Schedule(half_rows=True)
    with pytest.raises(ValueError, match="columns=3"):
        Schedule(columns=3)
    with pytest.raises(ValueError, match="most_columns=3"):
        Schedule(most_columns=3)
    with pytest.raises(ValueError, match="order='pages'"):
        Schedule(order="pages")
    with pytest.raises(ValueError, match="'blocks' needs consumers=1"):
        Schedule(overlap="blocks")
    assert [warpgroup_tokens(g) for g in range(1, 9)] == [64, 32, 16, 16, 8, 8, 8, 8]


def test_few_rows_are_shared_by_more_ctas():
    def chosen(tokens, requests=None, *, group=4, head_dim=128, kv_heads=8, split=False):
        found = schedule_for(
            tokens=tokens, requests=requests or tokens, kv_heads=kv_heads, group=group,
            head_dim=head_dim, split=split,
        )  # fmt: skip
        assert found.consumers == 1
        return found

    def half_columns(tokens, **shape):
        """Of half rows: several tokens of one request would read its keys several times."""
        found = chosen(tokens, -(-tokens // 2), **shape)
        assert not found.turned and found.half_rows
        assert (found.overlap == "blocks") == (found.columns > 1) == (not found.quiet)
        return found.columns, found.most_columns

    found = [half_columns(n) for n in (2, 4, 8, 16, 256)]
    assert found == [(4, None), (4, None), (2, 4), (1, None), (1, None)]
    assert half_columns(8, head_dim=64, kv_heads=3) == (2, None)
    turned = [chosen(n) for n in (1, 4, 8, 16, 256)]
    assert all(s.turned and not s.half_rows for s in turned)
    assert [s.columns for s in turned] == [2, 2, 2, 1, 1]
    assert [s.overlap for s in turned] == ["blocks"] * 3 + ["scores"] * 2
    assert not chosen(1, head_dim=64).turned and chosen(64, head_dim=64).turned
    assert not chosen(1, group=3).turned and not chosen(1, group=7).half_rows
    assert not chosen(8, 1).turned  # one request's
    assert [chosen(n).ctas for n in (64, 256)] == [128, 128]  # 4 and 16 full rounds of 132
    split = chosen(8, split=True)
    assert split.turned and (split.columns, split.stages, split.ctas) == (1, 2, 132)
    prefill = schedule_for(tokens=512, requests=8, kv_heads=8, group=4, head_dim=128)
    assert prefill.consumers == 2 and prefill.columns == 1 and not prefill.half_rows
    assert (prefill.overlap, prefill.order) == ("turns", "tiles")
    long = schedule_for(tokens=32_768, requests=1, kv_heads=8, group=4, head_dim=128)
    assert (long.overlap, long.order) == ("turns", "heads")
