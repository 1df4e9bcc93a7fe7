"""A device that gives out while the model loads: what is said, to those who decide whether to try again."""

import pytest
import torch

from pagedd.engine.config import EngineConfig
from pagedd.engine.create import create_engine
from pagedd.engine.errors import EngineError
from pagedd.engine.kv import storage as storage_module
from pagedd.engine.kv.storage import KVStorage, host_memory
from pagedd.engine.model.config import ModelConfig
from pagedd.engine.model.device import check_device
from pagedd.kernels.errors import UnfitError
from pagedd.kernels.kv_form import FORMS

CPU = torch.device("cpu")
CONFIG = ModelConfig(architecture="x", vocab_size=2, num_layers=1, num_kv_heads=1, head_dim=1, max_position=9)
LOST = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with …")


def load_that_ends_with(fault: Exception) -> None:
    def load(config: EngineConfig, progress: object) -> None:
        raise fault

    create_engine(EngineConfig(model="m"), lambda share, what: None, load)  # type: ignore[arg-type]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch):
    """A GPU is in use; what it answers is for the test to say."""

    def set_answer(fault: Exception | None) -> None:
        def synchronize() -> None:
            if fault is not None:
                raise fault

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    return set_answer


@pytest.mark.parametrize("fault", [LOST, ValueError("of all sorts, once the device is gone")], ids=["torch", "other"])
def test_a_device_that_is_lost_while_loading_is_unavailable(answers, fault) -> None:
    answers(LOST)
    with pytest.raises(EngineError, match=r"device_unavailable: cuda:0 answers with: CUDA error: .*; look at"):
        load_that_ends_with(fault)


@pytest.mark.parametrize(
    "fault",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        MemoryError(),
    ],
    ids=["torch", "cuBLAS", "handle", "Triton", "host"],
)
def test_memory_that_runs_out_while_loading_is_said_with_a_next_step(answers, fault) -> None:
    answers(None)
    with pytest.raises(EngineError, match=r"out_of_memory: memory ran out while the model loaded \(.+\); free some"):
        load_that_ends_with(fault)


def test_sizes_without_a_kernel_are_an_unsupported_model(answers) -> None:
    answers(None)
    with pytest.raises(EngineError, match=r"unsupported_model: no such tile; use device cpu"):
        load_that_ends_with(UnfitError("no such tile"))


def test_a_fault_on_a_device_that_answers_stays_what_it_is(answers) -> None:
    answers(None)
    with pytest.raises(ValueError, match=r"^a bug$"):
        load_that_ends_with(ValueError("a bug"))


@pytest.mark.parametrize(
    "allocate",
    [lambda: KVStorage(CONFIG, 1, 8, FORMS["float32"], CPU), lambda: host_memory(64, CPU)],
    ids=["pool", "host memory"],
)
def test_a_lost_device_is_no_lack_of_memory(monkeypatch, allocate) -> None:
    def lost(*size: object, **options: object) -> None:
        raise LOST

    monkeypatch.setattr(storage_module.torch, "empty", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        allocate()


def test_a_card_whose_memory_others_have_is_full_not_away(monkeypatch) -> None:
    def full(*size: int, device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with …")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(EngineError, match=r"out_of_memory: cuda:0 has no memory left to begin with .*; end what"):
        check_device(torch.device("cuda", 0))
