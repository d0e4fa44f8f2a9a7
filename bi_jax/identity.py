"""The identity: everything that fixes bits, and a short hash over it.

Within one identity, and given its seed, a completion's bits depend on nothing else. Across
identities nothing is promised, so whoever compares completions is told which fields differ.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bi_jax.models.checkpoint import weights_digest

from . import flags
from .versions import chip_name, library_versions

SHORT_LENGTH = 16
UNKNOWN_WEIGHTS = "not computed"

# Source that decides how fast, and what else cannot change a bit.
_NO_BITS = ("schedule.py", "cases.py", "contracts.py")
_CODE = ("pallas_kernels", "models", "bi_jax")
# Of our own layer only what computes; requests, scheduling and text cannot change a bit.
_COMPUTING = (
    *("ops.py", "sampling.py", "sampling_rows.py", "trainer_logprobs.py", "collectives.py"),
    *("kv_cache.py", "runner.py", "row_products.py", "peer_memory.py", "step_arguments.py"),
)


class IdentityWarning(UserWarning):
    """Completions that are compared were made under different identities."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What fixes the bits of a completion.

    Attributes:
      config: the model's shape, constants and dtypes.
      ops: op to backend and topology, as `TransformerOps.description`.
      weights: digest of the parameters in the compute dtype.
      kernels: digest of the source of ops, model and sampling.
      chip: the device, with its architecture.
      platform: JAX's name of the kind of device.
      versions: library to version.
      flags: compiler option to value.
      audited: whether the compiled programs are audited before they run.
    """

    config: str
    ops: tuple[tuple[str, str], ...]
    weights: str
    kernels: str
    chip: str
    platform: str
    versions: tuple[tuple[str, str], ...]
    flags: tuple[tuple[str, str], ...]
    audited: bool

    @functools.cached_property
    def short(self) -> str:
        """16 hexadecimal digits of a SHA-256 over all fields."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:SHORT_LENGTH]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the short hash."""
        fields: dict[str, Any] = dataclasses.asdict(self)
        for name in ("ops", "versions", "flags"):
            fields[name] = dict(fields[name])
        return {"short": self.short, **fields}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Identity:
        """The identity that `to_dict` wrote.

        Raises:
          ValueError: fields are missing or left over, or do not give the short hash in `data`.
        """
        fields = {key: value for key, value in data.items() if key != "short"}
        expected = {field.name for field in dataclasses.fields(cls)}
        if set(fields) != expected:
            raise ValueError(f"an identity has the fields {sorted(expected)}, got {sorted(fields)}")
        for name in ("ops", "versions", "flags"):
            fields[name] = tuple(fields[name].items())
        identity = cls(**fields)
        if data.get("short", identity.short) != identity.short:
            raise ValueError(
                f"the fields give the identity {identity.short}, but {data['short']} is written"
            )
        return identity

    def with_weights(self, weights: str) -> Identity:
        """The same with other weights, as after `update_weights`."""
        return dataclasses.replace(self, weights=weights)


class PendingIdentity:
    """An identity whose weights are perhaps still being hashed.

    Args:
      weights: their digest, to come.
      identity: from the digest to the identity.
    """

    def __init__(self, weights: Future[str], identity: Callable[[str], Identity]) -> None:
        self._weights, self._identity_with = weights, identity

    @functools.cached_property
    def identity(self) -> Identity:
        """Waits for the digest, and raises what making it raised."""
        return self._identity_with(self._weights.result())

    def short(self) -> str:
        """As `identity.short`."""
        return self.identity.short

    def settle(self) -> None:
        """Waits until the weights are hashed, or that failed."""
        wait([self._weights])


def identity_of(
    config: Any,
    ops_description: Iterable[tuple[str, str]],
    weights: str = UNKNOWN_WEIGHTS,
    *,
    device: Any = None,
    audited: bool = False,
) -> Identity:
    """The identity of programs that run this model here.

    Args:
      config: the model's TransformerConfig.
      ops_description: `TransformerOps.description`.
      weights: `digest_of_state(...)`, or what says that it was not computed.
      device: the device; None: the default one.
      audited: whether compiled programs are audited before they run.

    Cheap: source is read and versions are asked once a process; weights are not looked at.
    """
    device = device if device is not None else jax.devices()[0]
    return Identity(
        config=str(config),
        ops=tuple((str(name), str(what)) for name, what in ops_description),
        weights=weights,
        kernels=kernels_digest(),
        chip=chip_name(device),
        platform=device.platform,
        versions=library_versions(device.platform),
        flags=flags.in_force(device.platform),
        audited=audited,
    )


def digest_of_state(
    state: nnx.State, dtype: str | None = None, *, whole: Mapping[str, Any] | None = None
) -> str:
    """Digest of a model's parameters in the compute dtype, equal for sampler and trainer.

    Args:
      state: `nnx.state(model)`; other variables than parameters are left out.
      dtype: the compute dtype to cast to first; None: they are in it.
      whole: name to array as in a checkpoint, where `state` has them cut over ranks.
    """
    from bi_jax.models.cast import to_compute_dtype

    if whole is not None:
        return weights_digest(whole)
    params = {}
    for path, variable in nnx.to_flat_state(state):
        if isinstance(variable, nnx.Param):
            value = jnp.asarray(variable[...])
            cast = value if dtype is None else to_compute_dtype(value, dtype)
            params[".".join(map(str, path))] = cast
    return weights_digest(params)


@functools.cache
def kernels_digest() -> str:
    """Digest of the source that orders additions: ops, model and sampling, schedules left out."""
    digest = hashlib.sha256()
    for name, path in _sources():
        digest.update(f"{name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _sources() -> list[tuple[str, Path]]:
    import bi_jax
    import bi_jax.models
    import bi_jax.pallas_kernels

    found = []
    for folder, package in zip(_CODE, (bi_jax.pallas_kernels, bi_jax.models, bi_jax), strict=True):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if folder == "bi_jax" and name not in _COMPUTING:
                continue
            if folder == "models" and name.startswith(("checkpoint/", "families/")):
                continue
            if path.name not in _NO_BITS:
                found.append((f"{folder}/{name}", path))
    return found


def diff(a: Identity, b: Identity) -> dict[str, tuple[str, str]]:
    """The fields in which two identities differ, to their two values.

    Fields that are tables are compared entry by entry, named "versions.jaxlib" and so on; an entry
    that one of them lacks is given as "absent".
    """
    found: dict[str, tuple[str, str]] = {}
    for field in dataclasses.fields(Identity):
        mine, other = getattr(a, field.name), getattr(b, field.name)
        if mine == other:
            continue
        if not isinstance(mine, tuple):
            found[field.name] = (str(mine), str(other))
            continue
        left, right = dict(mine), dict(other)
        for key in [*left, *(key for key in right if key not in left)]:
            if left.get(key) != right.get(key):
                pair = (left.get(key, "absent"), right.get(key, "absent"))
                found[f"{field.name}.{key}"] = pair
    return found


def warn_if_different(a: Identity | str, b: Identity | str, *, what: str = "completions") -> bool:
    """Warns when two identities differ, naming the fields; returns whether they do.

    Args:
      a, b: identities, or the short hashes where no more is known.
      what: what is compared, for the message.
    """
    short_a = a if isinstance(a, str) else a.short
    short_b = b if isinstance(b, str) else b.short
    if short_a == short_b:
        return False
    message = f"the {what} compared have different identities, {short_a} and {short_b}"
    if isinstance(a, Identity) and isinstance(b, Identity):
        parts = [f"{name} ({_cut(x)} against {_cut(y)})" for name, (x, y) in diff(a, b).items()]
        message += f"; they differ in {', '.join(parts)}"
    message += ". Equal bits are promised within one identity only"
    warnings.warn(message, IdentityWarning, stacklevel=2)
    return True


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
