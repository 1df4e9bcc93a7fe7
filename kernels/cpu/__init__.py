"""The CPU's kernels in C++: built on the machine they run on, on first use, and kept.

Owns where they are and loading them; `build.py` compiles. What the extension offers is in `bindings.cpp`: packed
weights and a decoder whose whole forward pass is one call. Without a compiler `load` says why, and the torch path
serves instead.
"""

import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import time
from pathlib import Path
from types import ModuleType

import torch

from pagedd.kernels.cpu import build

log = logging.getLogger(__name__)


class KernelsUnavailableError(RuntimeError):
    """The extension cannot be had here; the message says why and what would help."""


@functools.cache
def load() -> ModuleType:
    """The extension, from the cache or built now (half a minute).

    Raises:
        KernelsUnavailableError: no compiler, or it failed.
    """
    folder = _build_folder()
    library = folder / f"{build.NAME}.so"
    try:
        if _is_whole(library):
            return _import(library)
        compiler = os.environ.get("CXX") or "g++"
        if shutil.which(shlex.split(compiler)[0]) is None:
            raise KernelsUnavailableError(f"no C++ compiler ({compiler} is not on the PATH); install g++")
        folder.mkdir(parents=True, exist_ok=True)
        # The kernel lets go of this lock when its holder is killed. torch's own lock, a file that exists, would stay.
        with (folder / "build.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(library):
                log.info("C++ kernels: building for this machine, once, which takes about half a minute")
                started = time.perf_counter()
                build.build_in_child(library)
                _digest_file(library).write_text(_digest(library))
                log.info("C++ kernels: built in %.0f s, kept in %s", time.perf_counter() - started, folder)
            return _import(library)
    except (OSError, RuntimeError, ImportError, ValueError) as error:
        if isinstance(error, KernelsUnavailableError):
            raise
        raise KernelsUnavailableError(f"building in {folder} failed: {error}") from error


def loaded() -> ModuleType | None:
    """The extension if this process has loaded it: where it serves, or could not be had, that has been found out."""
    return load() if load.cache_info().currsize else None


def _is_whole(library: Path) -> bool:
    """Whether all of what was built is there: importing a torn file ends the process."""
    try:
        return _digest_file(library).read_text() == _digest(library)
    except OSError:
        return False


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _import(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(build.NAME, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is no module")
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _build_folder() -> Path:
    """One for each source, torch and processor: a cache that moved to another machine builds anew."""
    digest = hashlib.sha256(" ".join([*build.FLAGS, torch.__version__, torch.__config__.show(), _processor()]).encode())
    for path in sorted([*build.FOLDER.glob("*.cpp"), *build.FOLDER.glob("*.h")]):
        digest.update(path.read_bytes())
    return _cache_root() / "kernels" / digest.hexdigest()[:16]


def _cache_root() -> Path:
    if kept := os.environ.get("CACHE_DIRECTORY"):  # systemd's
        return Path(kept)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedd"
    except RuntimeError as error:
        raise KernelsUnavailableError(
            "there is no folder to keep them in: the user has no home; set CACHE_DIRECTORY or XDG_CACHE_HOME"
        ) from error


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line for line in lines if line.startswith(("flags", "Features"))), "unknown")
