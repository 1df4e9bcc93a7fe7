"""The README says what is there."""

import re
from pathlib import Path

from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.settings import markdown_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# Made here and kept out of git, or git's own.
NOT_KEPT = {".git", ".venv", ".typing", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "build", "dist"}
NOT_KEPT |= {"snapshot_report.html"}  # of a picture of pagetop that has changed


def kept(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.iterdir()
        if path.name not in NOT_KEPT | {"__pycache__"} and not path.name.endswith(".egg-info")
    ]


def holds_files(folder: Path) -> bool:
    """Git keeps no empty folder, so neither does a fresh clone."""
    return any(path.is_file() or holds_files(path) for path in kept(folder))


def folders_below(folder: Path) -> list[Path]:
    found = [path for path in kept(folder) if path.is_dir() and holds_files(path)]
    return found + [deeper for path in found for deeper in folders_below(path)]


def test_the_file_tree_lists_exactly_what_exists() -> None:
    section = README.partition("## Files")[2]
    tree = section.split("```")[1].strip().splitlines()
    listed = [line.split()[0] for line in tree]
    files = [path.name for path in kept(ROOT) if path.is_file()]
    # The tests mirror the other folders.
    folders = [f"{path.relative_to(ROOT)}/" for path in folders_below(ROOT)]
    folders = [folder for folder in folders if not re.match(r"tests/.", folder)]
    assert listed == sorted(files + folders)
    assert all(len(line.split()) > 1 for line in tree), "each has a phrase"


def test_the_settings_that_it_shows_are_rows_of_the_whole_table() -> None:
    table = re.search(r"<!-- flags: begin -->\n(.*?)\n?<!-- flags: end -->", README, re.S)
    assert table is not None
    shown, whole = table[1].strip().splitlines(), markdown_table(DaemonConfig).splitlines()
    assert shown == [row for row in whole if row in shown], "paste rows of: pagedd config-table"
    assert len(shown) > 10


def test_every_file_that_a_page_names_exists() -> None:
    for page in ("README.md", "ARCHITECTURE.md", "SECURITY.md"):
        text = (ROOT / page).read_text()
        linked = re.findall(r"\]\(([\w./-]+)\)", text)
        named = re.findall(r"`((?:client|daemon|engine|kernels|tui|bench|scripts|tests|systemd|docs)/[\w./-]*)`", text)
        missing = [name for name in linked + named if not (ROOT / name).exists()]
        assert not missing, f"{page} names {missing}"


def test_the_readme_is_one_page() -> None:
    assert len(README.splitlines()) < 180
