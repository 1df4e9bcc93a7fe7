"""Compiles the C++ extension in a process of its own, which ends with whoever wants it and takes its compilers along.

    python -P build.py LIBRARY

Owns compiling. Where the library is kept, and who may build at a time, is decided in `__init__.py`.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

NAME = "pagedd_cpu"
PARTS = ("bindings", "decoder", "linear", "wide_product", "packing", "attention", "rope_kv", "sampling")
# Maybe-uninitialized: GCC 12 reports its own AVX-512 headers.
FLAGS = ["-O3", "-march=native", "-fopenmp", "-std=c++20", "-Wno-maybe-uninitialized"]
FOLDER = Path(__file__).parent

_SCRATCH = "build-"
_KILL_AFTER_S = 3.0


def build_in_child(library: Path) -> None:
    """Makes `library`. Raises `RuntimeError` with the compiler's words."""
    command = [sys.executable, "-P", __file__, str(library)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert child.stdin is not None  # pipes were asked for
    assert child.stdout is not None
    # The child sees the end of its standard input when this process ends, whatever it ends of.
    with child.stdin, child.stdout:
        said = child.stdout.read().decode(errors="replace").strip()
    if child.wait() != 0:
        raise RuntimeError(said or f"status {child.returncode}")


def build(library: Path) -> None:
    """Builds beside `library` and moves the result there, so that what is there is always whole."""
    from torch.utils import cpp_extension

    for left in library.parent.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=library.parent))
    # torch brings its own OpenMP runtime; linking that one lets both share one pool of threads.
    runtime = next(iter((Path(torch.__file__).parent / "lib").glob("libgomp*")), None)
    link = [] if runtime is None else [str(runtime), f"-Wl,-rpath,{runtime.parent}"]
    try:
        cpp_extension.load(
            NAME,
            [str(FOLDER / f"{part}.cpp") for part in PARTS],
            extra_cflags=FLAGS,
            extra_ldflags=link if link else ["-fopenmp"],
            build_directory=str(scratch),
        )
        (scratch / library.name).replace(library)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(argv: list[str]) -> int:
    # A handler, so that only the compilers end of the signal below: what is ignored would be so in them as well.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    try:
        build(Path(argv[0]))
    except (OSError, RuntimeError, ImportError) as error:
        print(error)
        return 1
    return 0


def _end_with_starter() -> None:
    while os.read(0, 1):
        pass
    # Ninja gives each compiler a group of its own, and passes the signal on.
    os.killpg(0, signal.SIGTERM)
    timer = threading.Timer(_KILL_AFTER_S, lambda: os.killpg(0, signal.SIGKILL))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
