"""Choices of device and dtype."""

import pytest
import torch

from pagedd.engine.errors import EngineError
from pagedd.engine.model import device as device_module
from pagedd.engine.model.device import check_device, choose_device, choose_dtype, device_name, num_physical_cores

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx2 avx512f", torch.float32),
        ("fpu avx512f avx512_bf16", torch.bfloat16),
        ("fpu amx_bf16 amx_tile", torch.bfloat16),
        ("", torch.float32),
    ],
)
def test_auto_on_a_cpu_is_bfloat16_where_it_is_multiplied_natively(monkeypatch, flags, dtype) -> None:
    monkeypatch.setattr(device_module, "_cpuinfo", lambda name: iter([flags] if flags else []))
    assert choose_dtype("auto", CPU) == dtype


def test_a_named_dtype_is_taken_and_an_unknown_one_refused() -> None:
    assert choose_dtype("float16", CPU) == torch.float16
    with pytest.raises(EngineError, match="invalid_setting: dtype 'fp8'"):
        choose_dtype("fp8", CPU)


def test_auto_is_the_cpu_where_torch_sees_no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:x"])
def test_a_device_that_is_not_served_is_refused(name) -> None:
    with pytest.raises(EngineError, match=f"invalid_setting: device '{name}'"):
        choose_device(name)


def test_a_torch_without_cuda_is_said(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(EngineError, match="unsupported_device: device 'cuda', but this torch is built without CUDA"):
        choose_device("cuda")


def test_a_driver_that_is_not_there_may_come_later(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EngineError, match="device_unavailable: device 'cuda', but torch sees no GPU"):
        choose_device("cuda")


def test_auto_says_so_when_it_leaves_a_gpu_unused(monkeypatch, caplog, tmp_path) -> None:
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030000\n")
    (tmp_path / "unreadable").mkdir()
    assert device_module._has_nvidia_card(tmp_path)
    (card / "class").write_text("0x040300\n")  # its sound
    assert not device_module._has_nvidia_card(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_module, "_has_nvidia_card", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert choose_device("auto") == CPU
    assert "this machine has an NVIDIA GPU, but this torch is built without CUDA" in caplog.text
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(EngineError, match="device_unavailable: torch cannot use this machine's GPU"):
        choose_device("auto")


GPU = torch.device("cuda", 0)


def test_a_card_that_does_not_compute_is_unavailable(monkeypatch) -> None:
    def capability(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("CUDA error: unknown error\nCompile with …")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    with pytest.raises(EngineError, match=r"device_unavailable: cuda:0 answers with: CUDA error: unknown error; look"):
        check_device(GPU)


def test_a_card_that_is_too_old_is_refused_with_both_numbers(monkeypatch) -> None:
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch, "zeros", lambda *size, device: torch.ones(1))
    with pytest.raises(EngineError, match=r"unsupported_device: cuda:0 has compute capability 7\.0, 7\.5 is needed"):
        check_device(GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    check_device(GPU)
    check_device(CPU)
    assert made_current == [GPU, GPU], "kernels are launched on the current device"


def test_a_gpu_that_is_not_there_is_refused_with_the_count(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("cuda") == torch.device("cuda", 0)
    with pytest.raises(EngineError, match="device_unavailable: device 'cuda:1', but torch sees 1 GPUs"):
        choose_device("cuda:1")


def test_this_machine_has_a_name_and_a_core() -> None:
    assert device_name(CPU)
    assert num_physical_cores() >= 1
