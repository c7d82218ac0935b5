"""Finds the packages; everything else is in pyproject.toml.

A renamed package (`papers` is installed as `gpu_accel_papers`) can not be found by setuptools' own configuration, and a
list written by hand would have to be edited for every paper.
"""

from setuptools import find_namespace_packages, find_packages, setup


def renamed(folder: str, name: str) -> list[str]:
    """The package `folder` and all below it, under the name it is installed with."""
    inside = find_namespace_packages(folder, exclude=["*__pycache__*", "*results*"])
    return [name, *(f"{name}.{package}" for package in inside)]


setup(
    packages=[
        *find_packages(include=["gpu_accel", "gpu_accel.*"]),
        *renamed("cli", "gpu_accel_cli"),
        *renamed("papers", "gpu_accel_papers"),
    ]
)
