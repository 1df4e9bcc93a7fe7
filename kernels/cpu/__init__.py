"""The CPU's kernels in C++: built on the machine they run on, on first use, and kept.

Owns building and loading. What the extension offers is in `bindings.cpp`: packed weights and a decoder whose whole
forward pass is one call. Without a compiler `load` says why, and the torch path serves instead.
"""

import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import ModuleType

import torch

log = logging.getLogger(__name__)

_NAME = "pagedd_cpu"
_SCRATCH = "build-"
_FOLDER = Path(__file__).parent
_SOURCES = ("bindings.cpp", "decoder.cpp", "linear.cpp", "packing.cpp", "attention.cpp", "rope_kv.cpp")
# Maybe-uninitialized: GCC 12 reports its own AVX-512 headers.
_FLAGS = ["-O3", "-march=native", "-fopenmp", "-std=c++20", "-Wno-maybe-uninitialized"]


class KernelsUnavailableError(RuntimeError):
    """The extension cannot be had here; the message says why and what would help."""


@functools.cache
def load() -> ModuleType:
    """The extension, from the cache or built now (half a minute).

    Raises:
        KernelsUnavailableError: no compiler, or it failed.
    """
    folder = _build_folder()
    library = folder / f"{_NAME}.so"
    try:
        if library.exists():
            return _import(library)
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise KernelsUnavailableError(f"no C++ compiler ({compiler} is not on the PATH); install g++")
        folder.mkdir(parents=True, exist_ok=True)
        # The kernel lets go of this lock when its holder is killed. torch's own lock, a file that exists, would stay.
        with (folder / "build.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _import(library) if library.exists() else _build(library)
    except (OSError, RuntimeError, ImportError) as error:
        if isinstance(error, KernelsUnavailableError):
            raise
        raise KernelsUnavailableError(f"building in {folder} failed: {error}") from error


def _build(library: Path) -> ModuleType:
    """Builds beside `library` and moves the result there: compilers of a killed process may go on, and harm nothing."""
    from torch.utils import cpp_extension

    started = time.perf_counter()
    for left in library.parent.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=library.parent))
    # torch brings its own OpenMP runtime; linking that one lets both share one pool of threads.
    runtime = next(iter((Path(torch.__file__).parent / "lib").glob("libgomp*")), None)
    link = [] if runtime is None else [str(runtime), f"-Wl,-rpath,{runtime.parent}"]
    try:
        extension: ModuleType = cpp_extension.load(
            _NAME,
            [str(_FOLDER / name) for name in _SOURCES],
            extra_cflags=_FLAGS,
            extra_ldflags=link if link else ["-fopenmp"],
            build_directory=str(scratch),
        )
        (scratch / library.name).replace(library)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    log.info("C++ kernels: built in %.0f s, kept in %s", time.perf_counter() - started, library.parent)
    return extension


def _import(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is no module")
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _build_folder() -> Path:
    """One for each source, torch and processor: a cache that moved to another machine builds anew."""
    digest = hashlib.sha256(" ".join([*_FLAGS, torch.__version__, torch.__config__.show(), _processor()]).encode())
    for path in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]):
        digest.update(path.read_bytes())
    cache = os.environ.get("CACHE_DIRECTORY") or os.environ.get("XDG_CACHE_HOME")
    root = Path(cache) if cache else Path.home() / ".cache"
    if not os.environ.get("CACHE_DIRECTORY"):
        root /= "pagedd"
    return root / "kernels" / digest.hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line for line in lines if line.startswith(("flags", "Features"))), "unknown")
