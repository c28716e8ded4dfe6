"""Simulator of a serving cluster in virtual time. It runs the scheduler's policies with a cost model of steps.

Imports no JAX. `serving.simulator.simulate` is the Python API, `amoeba simulate` the command; see docs/simulation.md.
"""
