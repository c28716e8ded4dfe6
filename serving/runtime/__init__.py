"""The engine behind the scheduler, and what the server shows of it."""
