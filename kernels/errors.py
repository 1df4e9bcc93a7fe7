"""What kernels refuse."""


class UnfitError(ValueError):
    """The backend has no kernel for such sizes, on this device."""
