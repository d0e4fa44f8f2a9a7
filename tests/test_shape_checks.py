"""The shape checks of the test suite can fail, and let a function's own refusal through."""

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jaxtyping import Array, Float

from tests import shape_checks


def double(x: Float[Array, "T D"], scale: Float[Array, " D"] | None = None) -> Float[Array, "T D"]:
    if x.ndim != 2:
        raise ValueError("x must have two axes")
    return x if scale is None else x[:1]


checked = jaxtyping.jaxtyped(double, typechecker=shape_checks.after_the_call)


def test_a_true_annotation_passes():
    assert checked(jnp.ones((2, 3))).shape == (2, 3)
    assert checked(jnp.ones((1, 3)), jnp.ones(3)).shape == (1, 3)


def test_numpy_arrays_are_arrays_and_are_checked_too():
    assert checked(np.ones((1, 3), np.float32), jnp.ones(3)).shape == (1, 3)
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(np.ones((1, 3), np.float32), np.ones(4, np.float32))


def test_a_wrong_result_and_a_wrong_argument_fail():
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(jnp.ones((2, 3)), jnp.ones(3))  # one row comes back
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(jnp.ones((1, 3)), jnp.ones(4))
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(jnp.ones((2, 3), jnp.int32))


def test_the_function_speaks_first():
    with pytest.raises(ValueError, match="two axes"):
        checked(jnp.ones(3))


def test_the_packages_are_checked():
    import bi_jax.models.rope  # imported here and not above: the hook has to be in place

    hooked = "bi_jax.models.rope"
    assert hooked in shape_checks.modules()
    assert type(bi_jax.models.rope.__loader__).__module__ == "jaxtyping._import_hook"
    assert not any(".kernel_" in name for name in shape_checks.modules())
