"""`amoeba bench`: load for a running server, and what came of it. Brings no JAX along."""
