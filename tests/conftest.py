"""Fixtures of the whole suite."""

import os
import shutil
import signal
from pathlib import Path
from types import ModuleType

import pytest

from pagedd.daemon.models import DEFAULT_MODEL, pull_model

# A shell starts what it puts into the background with interrupts ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers of pytest-xdist share the cores; threads of each would wait for one another. Read when torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton's kernels run on the CPU, number by number as they are written. Read when triton is imported, whoever does it.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def model_gguf() -> Path:
    """SmolLM2-135M-Instruct.Q4_1.gguf: `$PAGEDD_TEST_MODEL`, else from the cache, fetched into it once if need be."""
    given = os.environ.get("PAGEDD_TEST_MODEL")
    if given is None:
        return pull_model(DEFAULT_MODEL.name, report=print)
    path = Path(given)
    if not path.is_file():
        pytest.fail(f"PAGEDD_TEST_MODEL={given}: no such file; unset it to have the model fetched")
    return path


@pytest.fixture(scope="session")
def cpu_extension() -> ModuleType:
    """The C++ kernels. Only a missing compiler is a reason to skip; code that does not compile is a failure."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    from pagedd.kernels import cpu  # torch, which half of the suite does without

    return cpu.load()
