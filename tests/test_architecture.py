"""The arrows: which folder may import what. Every import statement is read, wherever it stands in a file."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("client", "kernels", "engine", "daemon", "tui", "scale")

ARROWS = {
    "client": set(),
    "kernels": set(),
    "engine": {"kernels"},
    "daemon": {"client", "engine"},
    "tui": {"client"},
    "scale": {"client"},
}
THIRD_PARTY = {
    "client": {"zmq", "msgspec", "shtab"},
    "kernels": {"torch", "triton", "numpy"},  # numpy sorts many times faster than torch on a CPU
    "engine": {"torch", "transformers", "tokenizers", "gguf", "safetensors", "numpy"},
    "daemon": {
        "aiohttp",
        "dbus_fast",
        "gguf",
        "huggingface_hub",
        "jinja2",
        "msgspec",
        "numpy",
        "opentelemetry",
        "prometheus_client",
        "psutil",
        "pynvml",
        "tokenizers",
        "uvloop",
        "zmq",
    },
    "tui": {"msgspec", "textual", "rich"},
    "scale": {"aiohttp", "ray", "starlette"},
}
# The engine process is started as a program of its own; no module of the front imports it.
ENGINE_PROCESS = "pagedd.daemon.engine_process"
ONLY_IN_THE_ENGINE_PROCESS = {"torch", "transformers", "triton", "safetensors"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """The dotted name of every module that a file's import statements may load."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield module
                # `from pagedd.client import protocol` loads a module too.
                yield from (f"{module}.{alias.name}" for alias in node.names if module.startswith("pagedd"))
            case ast.ImportFrom() if path.relative_to(ROOT).parts[0] in FOLDERS:
                pytest.fail(f"{path}:{node.lineno}: a relative import; write `pagedd.…`")


def module_path(name: str) -> Path | None:
    """The file of a module of ours, None for a name that is not a module."""
    if name == "pagedd" or not name.startswith("pagedd."):
        return None
    place = ROOT.joinpath(*name.split(".")[1:])
    for candidate in (place.with_suffix(".py"), place / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_where_its_arrows_point(folder: str) -> None:
    allowed = ARROWS[folder] | {folder}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in imports(path)
        if name.startswith("pagedd.") and name.split(".")[1] not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_the_third_parties_that_it_may(folder: str) -> None:
    allowed = THIRD_PARTY[folder] | set(sys.stdlib_module_names) | {"pagedd"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in imports(path)
        if name.split(".")[0] not in allowed
    ]
    assert not wrong


def test_no_file_imports_a_folder_of_ours_by_its_bare_name() -> None:
    """A bare `kernels` is Hugging Face's package of that name, or ours, as sys.path has it that day."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in (*FOLDERS, "bench", "tests")
        for path in sources(folder)
        for name in imports(path)
        if name.split(".")[0] in FOLDERS
    ]
    assert not wrong


def test_the_front_process_reaches_no_torch_through_any_import() -> None:
    reached: dict[str, str] = {}
    to_read = ["pagedd.daemon.cli", "pagedd.daemon.server"]
    while to_read:
        name = to_read.pop()
        path = module_path(name)
        if path is None or name in reached:
            continue
        reached[name] = str(path)
        to_read += [f"{name.rsplit('.', 1)[0]}", *imports(path)]
    assert ENGINE_PROCESS not in reached
    wrong = [
        f"{name} imports {imported}"
        for name, path in reached.items()
        for imported in imports(Path(path))
        if imported.split(".")[0] in ONLY_IN_THE_ENGINE_PROCESS
    ]
    assert not wrong


def test_the_front_process_loads_no_torch() -> None:
    program = (
        "import sys, pagedd.daemon.server, pagedd.daemon.cli;"
        f"print(sorted(set(sys.modules) & {ONLY_IN_THE_ENGINE_PROCESS!r}))"
    )
    loaded = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"


def test_the_engine_and_the_kernels_need_only_what_a_bare_gpu_machine_has() -> None:
    forbidden = ("gguf", "msgspec", "zmq", "aiohttp", "uvloop", "psutil", "pynvml", "textual", "prometheus_client")
    program = (
        "import sys; sys.modules.update(dict.fromkeys(" + repr(forbidden) + "));"
        "import pagedd.engine.create, pagedd.kernels.triton.backend, pagedd.bench.gpu_parts"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pyproject_lists_every_package_there_is() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        "pagedd." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in (*FOLDERS, "bench")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(settings["packages"]) == found
    assert settings["package-dir"] == {f"pagedd.{folder}": folder for folder in (*FOLDERS, "bench")}
    assert all((ROOT / folder / "py.typed").exists() for folder in FOLDERS)


def test_the_locks_satisfy_pyproject_and_name_every_dependency() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def locked(name: str) -> dict[str, str]:
        pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / name).read_text(), re.M)
        return {canonicalize_name(name): version for name, version in pins}

    run, dev = locked("requirements.lock"), locked("requirements-dev.lock")
    assert not run.keys() & dev.keys()
    dev |= locked("requirements-triton.lock")
    for wanted, pins in ((project["dependencies"], run), (project["optional-dependencies"]["dev"], run | dev)):
        for requirement in map(Requirement, wanted):
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    assert run["torch"] == "2.13.0"
