"""Whatever fixes bits changes the identity, and a difference is named field by field."""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from bi_jax import identity, versions
from bi_jax.identity import Identity, diff, digest_of_state, identity_of, warn_if_different

BASE = Identity(
    config="TransformerConfig(hidden_size=64)",
    ops=(("matmul", "reference: k_segments=1"), ("rms_norm", "reference: lanes=64")),
    weights="aa",
    kernels="bb",
    chip="a chip",
    platform="cpu",
    versions=(("jax", "0.11.2"), ("jaxlib", "0.11.2")),
    flags=(("xla_allow_excess_precision", "false"),),
    audited=True,
)

CHANGES = {
    "config": {"config": "TransformerConfig(hidden_size=65)"},
    "ops.matmul": {"ops": (("matmul", "reference: k_segments=8"), BASE.ops[1])},
    "weights": {"weights": "ab"},
    "kernels": {"kernels": "bc"},
    "chip": {"chip": "another"},
    "platform": {"platform": "gpu"},
    "versions.jaxlib": {"versions": (("jax", "0.11.2"), ("jaxlib", "0.11.3"))},
    "versions.ptxas": {"versions": (*BASE.versions, ("ptxas", "13.0"))},
    "flags.xla_allow_excess_precision": {"flags": (("xla_allow_excess_precision", "true"),)},
    "audited": {"audited": False},
}


def test_every_field_is_tried():
    tried = {name.split(".")[0] for name in CHANGES}
    assert tried == {field.name for field in dataclasses.fields(Identity)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_changes_the_hash_and_is_named(name):
    other = dataclasses.replace(BASE, **CHANGES[name])
    assert other.short != BASE.short and len(other.short) == 16
    assert list(diff(BASE, other)) == [name]
    with pytest.warns(identity.IdentityWarning, match=f"differ in {name}"):
        assert warn_if_different(BASE, other)


def test_equal_identities_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not warn_if_different(BASE, dataclasses.replace(BASE))
        assert not warn_if_different(BASE, BASE.short)
    assert diff(BASE, dataclasses.replace(BASE)) == {}


def test_hashes_alone_are_compared_too():
    with pytest.warns(identity.IdentityWarning, match="0123.*within one identity only"):
        assert warn_if_different(BASE, "0123456789abcdef", what="log-probabilities")


def test_it_is_written_and_read():
    data = json.loads(json.dumps(BASE.to_dict()))
    assert Identity.from_dict(data) == BASE
    with pytest.raises(ValueError, match=r"but .* is written"):
        Identity.from_dict({**data, "weights": "changed by hand"})
    with pytest.raises(ValueError, match="has the fields"):
        Identity.from_dict({"short": BASE.short})


def test_this_machine_has_one():
    ops = (("matmul", "reference: x"),)
    mine = identity_of("config", ops, "aa", audited=True)
    assert mine == identity_of("config", ops, "aa", audited=True)
    assert dict(mine.versions)["jaxlib"] == jax.lib.__version__
    assert dict(mine.flags)["xla_allow_excess_precision"] == "false"
    assert mine.platform == "cpu" and mine.chip == versions.chip_name(jax.devices()[0])


def test_source_counts_where_it_orders_additions():
    names = [name for name, _ in identity._sources()]
    for name in (
        "pallas_kernels/matmul/reference.py",
        "pallas_kernels/matmul/kernel_hopper.py",
        "pallas_kernels/attention/topology.py",
        "models/layers.py",
        "bi_jax/sampling.py",
    ):
        assert name in names
    assert not [n for n in names if n.endswith(("schedule.py", "cases.py")) or "checkpoint" in n]
    assert not [n for n in names if n.startswith("bi_jax/engine")]


def test_sampler_and_trainer_have_one_digest():
    """The digest is of the parameters as they are computed with, so a cast changes nothing."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    cast = jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16), state)
    assert digest_of_state(state, "bfloat16") == digest_of_state(cast)
    assert digest_of_state(state) != digest_of_state(cast)
    before = digest_of_state(state)
    model.kernel[...] = model.kernel[...].at[0, 0].add(2.0**-20)
    assert digest_of_state(nnx.state(model)) != before


def test_the_chip_names_its_vector_instructions():
    assert "[" in versions.chip_name(jax.devices("cpu")[0])
