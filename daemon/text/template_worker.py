"""Renders a chat template that may never end, or never stop growing, in a process that then ends instead.

A template comes with the model's files and can compute anything: nested loops, `10 ** 10 ** 9`, a string times a
billion. Counting steps inside Jinja misses the work of a single one, so the bounds are the kernel's:

* CPU time of compiling and of one rendering: `MAX_CPU_SECONDS`, by an interval timer whose signal ends the process;
* address space: `MAX_MEMORY_BYTES`, by a resource limit;
* length of the result: `template_environment.MAX_OUTPUT_CHARACTERS`, counted while it is produced;
* time to an answer as the caller sees it: `MAX_WAIT_SECONDS`, then the process is killed.

`TemplateWorker` is the caller's end; `main` is the process. They speak JSON in frames of a 4-byte length, over pipes:
when the caller dies, its pipe closes and the process ends.
"""

import json
import resource
import signal
import struct
import subprocess
import sys
import threading
from typing import IO, Any

from pagedd.client.errors import PageddError
from pagedd.daemon.core_files import forbid_core_files
from pagedd.daemon.text.template_environment import compile_template, describe, render_bounded

MAX_CPU_SECONDS = 1.0
MAX_MEMORY_BYTES = 512 << 20
MAX_WAIT_SECONDS = 15.0

_LENGTH = struct.Struct(">I")


class TemplateWorker:
    """Renders one template in a process of its own, started when first needed and again after it was ended.

    Any thread may call it; they take turns.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, variables: dict[str, Any]) -> str:
        """The template's text with `variables`, which are JSON. Blocks up to `MAX_WAIT_SECONDS`.

        Raises:
            PageddError: `template_error` with the template's own message, or with the bound that it met.
        """
        with self._lock:
            request: dict[str, Any] = {"variables": variables}
            if self._process is None:
                command = [sys.executable, "-P", "-m", __name__]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                request["template"] = self._source
            answer = _ask(self._process, request)
            if answer is None:
                why = _end(self._process)
                self._process = None
                raise PageddError("template_error", f"the chat template {why}; send a plain prompt instead")
        if "error" in answer:
            raise PageddError("template_error", answer["error"])
        return answer["text"]

    def close(self) -> None:
        """Ends the process; a later `render` starts another."""
        with self._lock:
            if self._process is not None:
                _end(self._process)
                self._process = None


def _ask(process: subprocess.Popen[bytes], request: dict[str, Any]) -> dict[str, str] | None:
    """The process's answer; None when it ended, which it does at the latest after `MAX_WAIT_SECONDS`."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("the process was started without pipes")
    watchdog = threading.Timer(MAX_WAIT_SECONDS, process.kill)
    watchdog.start()
    try:
        _write_frame(process.stdin, request)
        answer: dict[str, str] | None = _read_frame(process.stdout)
        return answer
    except BrokenPipeError:
        return None
    finally:
        watchdog.cancel()


def _end(process: subprocess.Popen[bytes]) -> str:
    """Ends the process if it has not ended, and says why it did."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    if process.returncode == -signal.SIGPROF:
        return f"did not finish within {MAX_CPU_SECONDS:g} s of CPU time"
    if process.returncode == -signal.SIGKILL:
        return f"gave no answer within {MAX_WAIT_SECONDS:g} s"
    return f"ended its process with status {process.returncode}"


def main() -> None:
    """Answers frames on standard input until it closes. The first carries the template."""
    for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C in the daemon's terminal, and its end, are the daemon's
        signal.signal(number, signal.SIG_IGN)
    forbid_core_files()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    source, template = "", None
    while (request := _read_frame(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
        try:
            source = request.get("template", source)
            template = template or compile_template(source)
            answer = {"text": render_bounded(template, request["variables"])}
        except MemoryError:
            answer = {"error": f"the chat template needs more than {MAX_MEMORY_BYTES >> 20} MiB"}
        except Exception as error:  # a template can raise anything; what it raised is the answer
            answer = {"error": describe(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write_frame(sys.stdout.buffer, answer)


def _read_frame(pipe: IO[bytes]) -> Any:
    """None when the pipe is closed, also in the middle of a frame."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (num_bytes,) = _LENGTH.unpack(header)
    body = pipe.read(num_bytes)
    return json.loads(body) if len(body) == num_bytes else None


def _write_frame(pipe: IO[bytes], message: object) -> None:
    body = json.dumps(message).encode()
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


if __name__ == "__main__":
    main()
