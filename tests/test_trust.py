"""Nothing that is read is run: no pickle, no code from a model's folder, no text that becomes a program."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for folder in ("client", "daemon", "engine", "kernels", "tui") for path in (ROOT / folder).rglob("*.py")
)
RUN_WHAT_THEY_READ = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "torch.load", "numpy.load", "np.load"}


def faults(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names if name.split(".")[0] in RUN_WHAT_THEY_READ]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS or name.rsplit(".", 1)[-1] in ("recv_pyobj", "send_pyobj"):
                found.append(name)
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False":
                    found.append("trust_remote_code")
                if keyword.arg == "shell" and ast.unparse(keyword.value) != "False":
                    found.append("shell")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_runs_what_it_reads(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "torch.load(path)",
        "socket.recv_pyobj()",
        "eval(text)",
        "AutoConfig.from_pretrained(folder, trust_remote_code=flag)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_the_look_at_sources_sees_each_of_its_kind(source: str) -> None:
    assert len(faults(source)) == 1


def test_every_loader_of_transformers_is_told_to_trust_no_code() -> None:
    loaders = [
        (path, node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained")
    ]
    assert loaders
    for path, node in loaders:
        assert "trust_remote_code" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"
