"""Implementations of the `amoeba` commands."""
