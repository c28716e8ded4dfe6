"""Simulator of a serving cluster in virtual time. It runs the scheduler's policies with a cost model of steps.

Imports no JAX. The Python API is `serving.simulator.simulate`, and the command is `amoeba simulate`. See
docs/simulation.md.
"""
