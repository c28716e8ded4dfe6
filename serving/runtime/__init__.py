"""Connection between engine, scheduler and server: executor, snapshots and metrics."""
