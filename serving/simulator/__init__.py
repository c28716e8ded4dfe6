"""A serving cluster in virtual time: the scheduler's own policies over a step-level cost model. Imports no JAX.

docs/simulation.md explains it; `serving.simulator.simulate` is the Python API, `amoeba simulate` the command.
"""
