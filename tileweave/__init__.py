"""Tileweave: a tile-level DSL and compiler that overlaps computation with communication."""

from importlib.metadata import version

__version__ = version("tileweave")
