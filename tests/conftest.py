"""Fixtures of the whole suite."""

import os
import signal
from pathlib import Path

import pytest

from pagedd.daemon.models import DEFAULT_MODEL, pull_model

# A shell starts what it puts into the background with interrupts ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
