"""What `pip install` of the wheel brings: built from the sdist, run from an empty folder and without the checkout."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values())
# What setuptools is called by, whoever builds: pip, pipx or build.
BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


def sources() -> list[str]:
    """What is built from, by its path in the repository."""
    inside = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*") if path.is_file()]
    kept = [str(path.relative_to(ROOT)) for path in inside if "__pycache__" not in path.parts]
    return ["LICENSE", "README.md", "pyproject.toml", *kept]


def build(hook: str, unpacked: Path, folder: Path) -> Path:
    command = [sys.executable, "-P", "-c", BUILD, hook, str(folder)]
    built = subprocess.run(command, cwd=unpacked, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / built.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy, since setuptools leaves folders of its own beside the sources.
    copy = tmp_path_factory.mktemp("sources")
    for name in sources():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    return build("build_sdist", copy, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("build_wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that has the wheel, and these tests' dependencies, but not this checkout."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    # Folders alone: what an editable install adds for its checkout is not read there.
    (packages / "dependencies.pth").write_text("\n".join(place for place in sys.path if "-packages" in place))
    return environment / "bin"


def run(installed: Path, tmp_path: Path, *command: str) -> str:
    finished = subprocess.run(
        [str(installed / command[0]), *command[1:]],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_wheel_has_every_file_of_the_packages_as_it_is_here(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: archive.read(name) for name in archive.namelist() if name.startswith("pagedd/")}
    # Figures that were measured are the repository's.
    wanted = {name for name in sources() if name.split("/")[0] in PACKAGES and not name.startswith("bench/results/")}
    assert {f"pagedd/{name}" for name in wanted} == set(inside)
    assert all(inside[f"pagedd/{name}"] == (ROOT / name).read_bytes() for name in wanted)
    assert {Path(name).suffix for name in inside} == {".py", ".typed", ".cpp", ".h", ".txt", ".pagetop"}


def test_the_sdist_has_what_the_wheel_is_built_from_and_its_licence(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"LICENSE", "README.md", "pyproject.toml", "kernels/cpu/decoder.cpp", "tui/demo.pagetop"}


def test_its_metadata_has_the_ranges_and_extras_of_pyproject(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = [re.split(r"[<>=]", line)[0] for line in required]
    assert names == [re.split(r"[<>=]", line)[0] for line in PROJECT["dependencies"]]
    assert all(re.search(r">=\d", line) for line in required)
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert (metadata["Requires-Python"], metadata["License-Expression"]) == (">=3.11", "Apache-2.0")


def test_its_commands_start_and_are_those_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    where = "import pagedd.daemon.cli as cli, pagedd.kernels.cpu.build as build; print(cli.__file__, build.__file__)"
    for place in run(installed, tmp_path, "python", "-P", "-c", where).split():
        assert Path(place).is_relative_to(installed.parent)
    assert run(installed, tmp_path, "pagedd", "--version") == f"pagedd {PROJECT['version']}\n"
    assert run(installed, tmp_path, "pagectl", "version").startswith(f"pagectl {PROJECT['version']}\n")


def test_pagetop_shows_its_demo(installed: Path, tmp_path: Path) -> None:
    shown = run(installed, tmp_path, "pagetop", "--demo", "--once", "--ascii")
    assert "slot fill" in shown
    assert len(shown.splitlines()) > 20


def test_its_kernels_build(installed: Path, tmp_path: Path, cpu_extension: object) -> None:
    """From the cache where this checkout's are built, for whose sources, the same to the byte, they are kept."""
    run(installed, tmp_path, "python", "-P", "-m", "pagedd.kernels.cpu")
    run(installed, tmp_path, "python", "-P", "-c", "import pagedd.kernels.cpu as cpu; cpu.load().PackedLinear")
