"""Packages are found, not listed; ``configs/`` at the top is installed as ``ppl_eval.configs``."""

from setuptools import find_packages, setup

setup(packages=[*find_packages("recipes"), "ppl_eval.configs"])
