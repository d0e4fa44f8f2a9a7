"""The layout arithmetic: every number of a checkpoint in its place, and no other."""

import jax.numpy as jnp
import numpy as np
import pytest

from bi_jax.models.checkpoint.plan import parameter_shapes
from bi_jax.models.config import TP_INVARIANT, RopeConfig, TransformerConfig
from bi_jax.models.parallel_layout import ABSENT, ParallelLayout

BASE = TransformerConfig(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=608,
    num_layers=1,
    num_query_heads=9,
    num_kv_heads=3,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_position=64,
    qkv_bias=True,
)
# (query heads, KV heads): gaps, fewer KV heads than ranks, fewer heads than ranks, all even.
HEADS = ((9, 3), (14, 2), (12, 2), (4, 1), (8, 8), (32, 8), (5, 5))
DEGREES = (1, 2, 3, 4, 8)


def layouts() -> list[ParallelLayout]:
    found = []
    for heads, kv in HEADS:
        config = BASE.replace(num_query_heads=heads, num_kv_heads=kv)
        found += [ParallelLayout(config=config, degree=degree) for degree in DEGREES]
        config = config.replace(topology=TP_INVARIANT)
        found += [ParallelLayout(config=config, degree=degree) for degree in (1, 2, 4, 8)]
    return found


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return 1 + np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def name_of(layout: ParallelLayout) -> str:
    config = layout.config
    heads = f"{config.num_query_heads} of {config.num_kv_heads}"
    return f"{heads}, {layout.degree} ranks, {layout.segments} segments"


@pytest.mark.parametrize("layout", layouts(), ids=name_of)
def test_parameters_come_back_and_what_is_added_is_zero(layout: ParallelLayout):
    shapes = parameter_shapes(layout.config)
    wanted = layout.shapes(shapes)
    for name, shape in shapes.items():
        array = numbered(shape)
        laid = layout.lay_out(name, array)
        assert laid.shape == wanted[name], name
        assert set(np.unique(laid)) <= {0, *np.unique(array)}
        assert np.isin(array, laid).all()
        assert np.array_equal(layout.restore(name, laid), array), name
        axis = layout.sharded_axis(name)
        assert axis is None or laid.shape[axis] % layout.degree == 0
        plain = layout.plain_axis(name)
        if plain is not None:
            assert axis is not None
            pieces = np.split(array, layout.degree, plain), np.split(laid, layout.degree, axis)
            for ours, theirs in zip(*pieces, strict=True):
                assert np.array_equal(np.sort(ours, None), np.sort(theirs, None)), name


@pytest.mark.parametrize("layout", layouts(), ids=name_of)
def test_a_rank_holds_the_heads_that_its_segments_want(layout: ParallelLayout):
    """The out product of a model whose heads and weights are numbers of heads, rank by rank."""
    if layout.trivial:
        return
    config, group = layout.config, layout.config.queries_per_kv
    heads = np.stack([1000 + q + 0 * np.arange(16) for q in range(config.num_query_heads)])
    weight = np.zeros((1, config.query_size), np.int64)
    weight[0] = 10 ** np.repeat(np.arange(config.num_query_heads) % 3, 16)
    laid = layout.lay_out("layers.0.attention.out.weight", weight)
    total = 0
    for rank in range(layout.degree):
        table = layout.qkv_table[rank]
        # What attention gives: a slot's row holds the query head that its weight row came from.
        kv, inner = np.divmod(table, group + 2)
        is_query = (table != ABSENT) & (np.arange(layout.group + 2) < layout.group)
        mixed = np.where(is_query[..., None], heads[(kv * group + inner) % len(heads)], -777)
        mixed = mixed[:, :-2].reshape(-1, 16)
        picked = np.where(
            (layout.head_table[rank] == ABSENT)[..., None], 0, mixed[layout.head_table[rank]]
        )
        for segment, x in enumerate(picked.reshape(layout.local_segments, -1)):
            w = laid[rank * layout.local_segments + segment, 0]
            total += x @ w[: x.size]
            assert not w[x.size :].any()
    assert total == heads.reshape(-1) @ weight[0]


def test_cuts_stand_at_fixed_places_of_the_global_sizes():
    config = BASE.replace(topology=TP_INVARIANT)
    layout = ParallelLayout(config=config, degree=4)
    assert layout.width_cuts == tuple(16 * c for c in (0, 4, 9, 14, 19, 23, 28, 33, 38))
    assert layout.head_cuts == (0, 1, 2, 3, 4, 5, 6, 7, 9)
    assert layout.down_depth == 80 and layout.out_depth == 32
    for degree in (1, 2, 8):
        other = ParallelLayout(config=config, degree=degree)
        assert other.width_cuts == layout.width_cuts
        assert (other.down_depth, other.out_depth) == (80, 32)
    # The default topology's cuts for fewer ranks are among those for more.
    cuts = [set(ParallelLayout(config=BASE, degree=d).width_cuts) for d in (2, 4, 8)]
    assert cuts[0] < cuts[1] < cuts[2]


def test_an_even_model_is_cut_without_padding():
    config = BASE.replace(
        num_query_heads=32, num_kv_heads=8, intermediate_size=1024, vocab_size=1024
    )
    shapes = parameter_shapes(config)
    for degree in (2, 4, 8):
        layout = ParallelLayout(config=config, degree=degree)
        assert layout.heads_in_order and layout.slots == 8 // degree and layout.group == 4
        for name, shape in layout.shapes(shapes).items():
            assert np.prod(shape) == np.prod(shapes[name]), name
            assert (layout.plain_axis(name) is None) == (layout.sharded_axis(name) is None)


def test_fewer_kv_heads_than_ranks_are_held_by_several():
    config = BASE.replace(num_query_heads=16, num_kv_heads=2)
    layout = ParallelLayout(config=config, degree=8)
    assert (layout.slots, layout.group, layout.cache_heads) == (1, 2, 8)
    assert [list(heads) for heads in layout.rank_kv_heads] == [[0]] * 4 + [[1]] * 4


def test_degrees_that_do_not_fit_are_refused_by_name():
    config = BASE.replace(topology=TP_INVARIANT)
    for degree in (3, 5, 16):
        with pytest.raises(ValueError, match=f"tensor_parallel_size={degree} must divide the 8"):
            ParallelLayout(config=config, degree=degree)
    for bad in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match="must be a positive whole number"):
            ParallelLayout(config=BASE, degree=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="topology='other' must be one of"):
        BASE.replace(topology="other")


def test_a_device_lays_out_as_the_host_does():
    layout = ParallelLayout(config=BASE, degree=4)
    for name, shape in parameter_shapes(BASE).items():
        array = numbered(shape)
        ours = layout.lay_out(name, jnp.asarray(array), jnp)
        assert np.array_equal(ours, layout.lay_out(name, array)), name
