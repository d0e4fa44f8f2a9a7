"""Finds the packages: three folders at the top level are one import package, `bi_jax`.

Users have a `models` package of their own, so ours is installed as `bi_jax.models`. The mapping of
folders is in pyproject.toml; only the list of subpackages is made here, so that a new subfolder
needs no edit.
"""

from setuptools import find_packages, setup

FOLDERS = {"bi_jax": "bi_jax", "models": "bi_jax.models", "pallas_kernels": "bi_jax.pallas_kernels"}


def packages() -> list[str]:
    found = []
    for folder, name in FOLDERS.items():
        found.append(name)
        found.extend(f"{name}.{sub}" for sub in find_packages(folder))
    return found


setup(packages=packages())
