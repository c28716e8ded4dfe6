"""What hostile clients send to a server, and what innocent ones see of it. For hostile.py, fuzz.py and soak.py."""
