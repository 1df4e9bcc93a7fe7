"""How many of torch's threads an operation on few rows takes.

torch ends each parallel operation with a barrier. Where another program holds a core, that waits for a turn of the
system's scheduler: tens of milliseconds, a few times for each drawn token. One thread has nobody to wait for, and over
few rows it is as quick. The CPU's kernels need none of this: their phases wait for work, not for threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FEW_ROWS = 4  # of a vocabulary


@contextmanager
def threads_for(num_rows: int) -> Iterator[None]:
    """Within it torch computes with one thread, if there are few rows."""
    num_threads = torch.get_num_threads()
    if num_rows > FEW_ROWS or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
