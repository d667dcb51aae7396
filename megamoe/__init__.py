"""Megatron-style training of Kimi-K3-family models on Hopper: see README.md for the reading order."""

__version__ = "0.1.0"
