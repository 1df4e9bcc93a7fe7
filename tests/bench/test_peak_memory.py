"""Peak memory: of a whole process tree, while a block runs."""

import asyncio
import sys
from types import SimpleNamespace

import psutil
import pytest

from pagedd.bench import peak_memory
from pagedd.bench.peak_memory import PeakMemory, tree_bytes


class FakeProcess:
    def __init__(self, rss: int, *children: "FakeProcess", ended: bool = False) -> None:
        self._rss, self._children, self._ended = rss, children, ended

    def children(self, *, recursive: bool) -> list["FakeProcess"]:
        assert recursive
        return list(self._children)

    def memory_info(self) -> SimpleNamespace:
        if self._ended:
            raise psutil.NoSuchProcess(1)
        return SimpleNamespace(rss=self._rss)


def test_a_tree_is_the_sum_of_its_processes_and_those_that_ended_count_as_none():
    assert tree_bytes(FakeProcess(100, FakeProcess(20), FakeProcess(7, ended=True), FakeProcess(3))) == 123


async def test_the_peak_is_the_largest_sample_not_the_last(monkeypatch: pytest.MonkeyPatch):
    sizes, sampled_all = [5, 90, 30, 10], asyncio.Event()

    def next_size(root: psutil.Process) -> int:
        if len(sizes) == 1:
            sampled_all.set()
            return sizes[0]
        return sizes.pop(0)

    monkeypatch.setattr(peak_memory, "tree_bytes", next_size)
    async with PeakMemory(psutil.Process().pid, interval_s=0.001) as memory:
        await sampled_all.wait()
    assert memory.peak_bytes == 90


async def test_a_process_that_ends_meanwhile_ends_no_measurement():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    async with PeakMemory(process.pid, interval_s=0.01) as memory:
        await asyncio.sleep(0.02)
        await process.communicate(b"\n")
        await asyncio.sleep(0.02)
    assert memory.peak_bytes > 0
