"""Which backend answers, and why."""

import inspect
import sys

import pytest
import torch

from pagedd.kernels import ops, reference, torch_ops
from pagedd.kernels.triton import backend as triton_ops

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.delenv(ops.BACKEND_VARIABLE, raising=False)
    yield
    monkeypatch.undo()
    ops.select_backend(CPU)


def test_a_cpu_gets_the_torch_backend() -> None:
    choice = ops.select_backend(CPU)
    assert (choice.name, choice.reason) == ("torch", "the vectorised torch path is the one built for cpu")


def test_the_environment_overrides_the_choice(monkeypatch) -> None:
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "reference")
    assert ops.select_backend(CPU).name == "reference"
    x = torch.ones(1, 2)
    monkeypatch.setattr(reference, "silu_and_mul", lambda x: x + 1)
    assert torch.equal(ops.silu_and_mul(x), x + 1)


def test_an_unknown_backend_is_refused_with_the_names_of_the_known_ones(monkeypatch) -> None:
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "cudnn")
    with pytest.raises(ValueError, match=r"PAGEDD_KERNELS='cudnn'.*reference, torch, triton"):
        ops.select_backend(CPU)


def test_a_gpu_gets_triton_which_can_be_captured_and_torch_where_triton_is_missing(monkeypatch) -> None:
    choice = ops.select_backend(torch.device("cuda", 0))
    assert (choice.name, choice.can_be_captured) == ("triton", True)
    monkeypatch.setitem(sys.modules, "pagedd.kernels.triton.backend", None)
    choice = ops.select_backend(torch.device("cuda", 0))
    assert (choice.name, choice.can_be_captured) == ("torch", False)
    assert choice.reason.startswith("Triton's kernels cannot be imported")


def test_triton_on_a_cpu_is_refused_unless_it_is_interpreted(monkeypatch) -> None:
    monkeypatch.setenv(ops.BACKEND_VARIABLE, "triton")
    assert not ops.select_backend(CPU).can_be_captured
    monkeypatch.setattr(triton_ops, "IS_INTERPRETED", False)
    with pytest.raises(ValueError, match="Triton needs a GPU, or TRITON_INTERPRET=1"):
        ops.select_backend(CPU)


@pytest.mark.parametrize(
    "backend", [reference, torch_ops, triton_ops], ids=lambda module: module.__name__.rpartition(".")[2]
)
def test_backends_have_the_public_signatures(backend) -> None:
    names = [name for name in vars(ops.Backend) if not name.startswith("_")]
    assert len(names) == 9
    for name in names:
        public, own = inspect.signature(getattr(ops, name)), inspect.signature(getattr(backend, name))
        assert own == public, name
