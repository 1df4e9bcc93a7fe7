"""The fetched models that are kept on this machine: how large each is, when it was last served, and its removal.

Owns the look at the cache; `models.py` has its layout and fills it. A model that was given as a path is none of these.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagedd.client.errors import PageddError
from pagedd.client.nearest import did_you_mean
from pagedd.client.render import table
from pagedd.daemon.files import file_lock, reason
from pagedd.daemon.model_use import is_used
from pagedd.daemon.models import KNOWN_MODELS, cache_directory, name_of_folder
from pagedd.daemon.prepared import load_prepared
from pagedd.daemon.wall_clock import unix_s

_DAY_S = 86_400
# Of the folder of a fetch that did not end (`model_download.py`), whose name begins with a dot.
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class KeptModel:
    """`name` is what `pagedd pull` takes. `last_use_s` (Unix time) is when it was last prepared or served, None never.

    Attributes:
        folder: its weights; of a fetch that did not end, what there is so far.
        prepared: what was made of it for the front.
    """

    name: str
    folder: Path
    is_whole: bool
    num_bytes: int
    last_use_s: float | None
    prepared: tuple[Path, ...]


def kept_models() -> list[KeptModel]:
    """In the order of their names. Raises `PageddError("model_unavailable")` when the cache cannot be read."""
    try:
        return sorted(_look(cache_directory()), key=lambda model: model.name.lower())
    except OSError as error:
        raise PageddError("model_unavailable", f"{cache_directory()} cannot be read: {reason(error)}") from error


def remove_model(name: str) -> list[KeptModel]:
    """Removes it, whole or not, with what was prepared of it; returns what is gone.

    Raises `PageddError`: model_unavailable, or model_in_use while a daemon serves it, whose engine would not find its
    weights when it starts again.
    """
    kept = kept_models()
    known = KNOWN_MODELS.get(name.lower())
    wanted = known.name if known is not None else name
    found = [model for model in kept if model.name.lower() == wanted.lower()]
    if not found:
        hint = did_you_mean(name, [model.name for model in kept], "`pagedd models` lists those that are")
        raise PageddError("model_unavailable", f"{name!r}: no model of that name is kept; {hint}")
    for model in found:
        # Whoever fetches it just now comes first.
        with file_lock(model.folder.with_name(f"{_stem(model.folder)}.lock")):
            try:
                if is_used(model.folder):
                    why = f"a daemon serves {model.name}; stop it, or have it `load` another first"
                    raise PageddError("model_in_use", why)
                for folder in (*model.prepared, model.folder):
                    shutil.rmtree(folder)
            except OSError as error:
                why = f"{model.folder} cannot be removed: {reason(error)}"
                raise PageddError("model_unavailable", why) from error
    return found


def models_table(models: list[KeptModel], now_s: float | None = None) -> Iterator[str]:
    """A line for each, under a heading."""
    now_s = unix_s() if now_s is None else now_s
    rows = [["name", "size", "last use", "path"]]
    for model in models:
        name = model.name if model.is_whole else f"{model.name} (not whole)"
        rows.append([name, _size(model.num_bytes), _ago(model, now_s), str(model.folder)])
    return table(rows, left={0, 2, 3})


def _look(cache: Path) -> Iterator[KeptModel]:
    root = cache / "models"
    prepared = list(_prepared(cache / "prepared"))
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        is_whole = not folder.name.startswith(".")
        if not folder.is_dir() or not (is_whole or folder.name.endswith(_PARTIAL)):
            continue
        of_it = [made for made, weights in prepared if weights.is_relative_to(folder)]
        yield KeptModel(
            name=name_of_folder(_stem(folder)),
            folder=folder,
            is_whole=is_whole,
            num_bytes=sum(_num_bytes(each) for each in (folder, *of_it)),
            last_use_s=max((made.stat().st_mtime for made in of_it), default=None),
            prepared=tuple(of_it),
        )


def _stem(folder: Path) -> str:
    """The folder's name once it is whole."""
    return folder.name.removeprefix(".").removesuffix(_PARTIAL) if folder.name.startswith(".") else folder.name


def _prepared(root: Path) -> Iterator[tuple[Path, Path]]:
    """Each prepared folder and the weights that it is of; one that is torn is of none."""
    for folder in root.iterdir() if root.is_dir() else ():
        try:
            yield folder, Path(load_prepared(folder).weights)
        except (OSError, msgspec.MsgspecError):
            continue


def _num_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _ago(model: KeptModel, now_s: float) -> str:
    if model.last_use_s is None:
        return "never"
    num_days = int((now_s - model.last_use_s) // _DAY_S)
    return "today" if num_days < 1 else "yesterday" if num_days == 1 else f"{num_days} days ago"
