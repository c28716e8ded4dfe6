"""Hostile clients, innocent requests and the server under test, for hostile.py, fuzz.py and soak.py."""
