"""Imports `pagedd` from a checkout that is not installed: folder X is the package pagedd.X."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


class CheckoutFinder:
    """Finds `pagedd` and the packages directly below it; what is in those, Python finds itself."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, name = fullname.partition(".")
        if parent != "pagedd" or "." in name:
            return None
        if not name:
            spec = ModuleSpec("pagedd", None, is_package=True)
            spec.submodule_search_locations = []
            return spec
        folder = self._root / name
        return spec_from_file_location(fullname, folder / "__init__.py", submodule_search_locations=[str(folder)])


def use_checkout(root: Path) -> None:
    """From now on `import pagedd.X` means `root`/X. The script's own folder must not be on the path: see `-P`."""
    sys.meta_path.insert(0, CheckoutFinder(root))
