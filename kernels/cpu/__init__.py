"""The CPU's kernels in C++: built on the machine they run on, on first use, and kept.

Owns building and loading. What the extension offers is in `bindings.cpp`: packed weights and a decoder whose whole
forward pass is one call. Without a compiler `load` says why, and the torch path serves instead.
"""

import functools
import hashlib
import logging
import os
import shutil
import time
from pathlib import Path
from types import ModuleType

import torch

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = ("bindings.cpp", "decoder.cpp", "linear.cpp", "attention.cpp", "rope_kv.cpp")
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
    compiler = os.environ.get("CXX", "g++")
    folder = _build_folder()
    started = time.perf_counter()
    is_built = (folder / "pagedd_cpu.so").exists()
    if not is_built and shutil.which(compiler) is None:
        raise KernelsUnavailableError(f"no C++ compiler ({compiler} is not on the PATH); install g++")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        extension = _load(folder)
    except (OSError, RuntimeError, ImportError) as error:
        raise KernelsUnavailableError(f"building in {folder} failed: {error}") from error
    if not is_built:
        log.info("C++ kernels: built in %.0f s, kept in %s", time.perf_counter() - started, folder)
    return extension


def _load(folder: Path) -> ModuleType:
    from torch.utils import cpp_extension

    # torch brings its own OpenMP runtime; linking that one lets both share one pool of threads.
    runtime = next(iter((Path(torch.__file__).parent / "lib").glob("libgomp*")), None)
    link = [] if runtime is None else [str(runtime), f"-Wl,-rpath,{runtime.parent}"]
    module: ModuleType = cpp_extension.load(
        "pagedd_cpu",
        [str(_FOLDER / name) for name in _SOURCES],
        extra_cflags=_FLAGS,
        extra_ldflags=link if link else ["-fopenmp"],
        build_directory=str(folder),
    )
    return module


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
