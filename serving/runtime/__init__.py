"""Connection between engine, scheduler and server: execution of the scheduler's actions, snapshots and metrics."""
