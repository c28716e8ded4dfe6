"""Errors about layouts and device memory."""


class LayoutError(ValueError):
    """A device group, tensor-parallel degree, placement or page geometry is not supported."""


class MemoryBudgetError(ValueError):
    """Buffers or temporary memory exceed the memory budget of a device, or the budget cannot be parsed."""
