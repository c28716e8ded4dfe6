"""Simulator of a serving cluster in virtual time: the scheduler's policies over a cost model of steps.

Imports no JAX. `serving.simulator.simulate` is the Python API, `amoeba simulate` the command; see docs/simulation.md.
"""
