"""`amoeba bench`: load generator for a running server, and its report. Imports no JAX."""
