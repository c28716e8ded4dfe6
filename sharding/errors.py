"""Errors about layouts and device memory, raised while an engine is being set up."""


class LayoutError(ValueError):
    """A device group, tensor-parallel degree or page geometry that cannot exist."""


class MemoryBudgetError(ValueError):
    """What must live on a device does not fit into its memory budget."""
