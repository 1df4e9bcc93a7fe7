"""`python -P -m pagedd.kernels.cpu`: builds the C++ kernels if they are not there, and says how it went."""

import sys

from pagedd.kernels import cpu

try:
    cpu.load()
except cpu.KernelsUnavailableError as error:
    print(f"pagedd: no C++ kernels, the slower torch path will serve: {error}", file=sys.stderr)
else:
    print("pagedd: the C++ kernels are built")
