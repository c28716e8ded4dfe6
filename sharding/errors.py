"""Errors about layouts and device memory, raised during start-up."""


class LayoutError(ValueError):
    """Error: unsupported device group, tensor-parallel degree, placement or page geometry."""


class MemoryBudgetError(ValueError):
    """Error: buffers or temporary memory exceed the memory budget of a device, or the budget cannot be parsed."""
