"""A template that would never end, or would take all memory, ends in a refusal, and the next request is served."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.text import template_worker
from pagedd.daemon.text.template_worker import TemplateWorker

THRICE_NESTED = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
UNBOUNDED_IF_ASKED = "{% if messages %}" + THRICE_NESTED + "{% else %}ok{% endif %}"


@contextmanager
def worker(source: str) -> Iterator[TemplateWorker]:
    made = TemplateWorker(source)
    try:
        yield made
    finally:
        made.close()


def refusal(source: str, messages: list[str]) -> str:
    with worker(source) as made, pytest.raises(PageddError) as refused:
        made.render({"messages": messages})
    assert refused.value.code == "template_error"
    return refused.value.message


@pytest.mark.parametrize("source", [THRICE_NESTED, "{{ 10 ** (10 ** 9) }}"])
def test_endless_work_ends_at_the_cpu_bound(source: str) -> None:
    assert "did not finish within 1 s of CPU time" in refusal(source, ["a"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ messages[0] * 10 ** 10 }}",
        "{{ '%10000000000d' | format(1) }}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    ],
)
def test_endless_growth_ends_at_the_memory_bound(source: str) -> None:
    assert "needs more than 512 MiB" in refusal(source, ["a"])


def test_a_text_longer_than_the_bound_is_refused() -> None:
    source = "{% for i in range(99999) %}{{ messages[0] * 1000 }}{% endfor %}"
    assert "longer than 16777216 characters" in refusal(source, ["a"])


def test_after_a_bound_was_met_the_next_request_is_served() -> None:
    with worker(UNBOUNDED_IF_ASKED) as made:
        assert made.render({"messages": []}) == "ok"
        with pytest.raises(PageddError):
            made.render({"messages": ["a"]})
        assert made.render({"messages": []}) == "ok"


def test_a_process_that_gives_no_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_worker, "MAX_WAIT_SECONDS", 0.2)
    assert "gave no answer within 0.2 s" in refusal(THRICE_NESTED, ["a"])


async def test_the_event_loop_goes_on_while_a_template_is_bounded() -> None:
    with worker(THRICE_NESTED) as made:
        rendering = asyncio.create_task(asyncio.to_thread(made.render, {"messages": []}))
        turns = 0
        while not rendering.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(PageddError):
            await rendering
    assert turns >= 5


def test_the_process_ends_with_the_one_that_started_it() -> None:
    program = (
        "import signal, os, sys\n"
        "from pagedd.daemon.text.template_worker import TemplateWorker\n"
        "worker = TemplateWorker('ok')\n"
        "worker.render({})\n"
        "print(worker._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    started = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert started.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in [int(started.stdout)] if psutil.pid_exists(pid)], 10)
    assert alive == []


def test_the_process_loads_neither_torch_nor_the_tokenizers() -> None:
    program = (
        "import sys, pagedd.daemon.text.template_worker\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
