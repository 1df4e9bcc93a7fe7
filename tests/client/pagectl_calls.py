"""The ways in which tests call `pagectl`; the fixtures `run` and `start` are in `conftest.py`."""

import io
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., int]
Start = Callable[..., "subprocess.Popen[bytes]"]


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Standard input is this text, and no terminal."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
