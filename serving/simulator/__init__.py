"""Simulator of a serving cluster. It computes the latencies of requests, and runs no model.

The scheduler's policies run unchanged. A cost model gives the time of each step. The time of a simulation (virtual
time) jumps from one event to the next. This package imports no JAX. The Python API is `serving.simulator.simulate`, and
the command is `amoeba simulate`. See docs/simulation.md.
"""
