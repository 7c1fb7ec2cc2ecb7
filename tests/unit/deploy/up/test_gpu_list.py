"""Laws of the list of GPUs: the names of CUDA_VISIBLE_DEVICES, restriction by --gpus, and missing drivers."""

import ctypes
import logging
import os

import pytest
from baton.cluster.config.roles import UpConfig
from baton.cluster.errors import ConfigError
from baton.deploy.up import gpu_list
from baton.deploy.up.gpu_list import Gpu, find_gpus, ordered, parse_gpus, restrict
from baton.deploy.up.gpu_probe import MAJOR, MINOR, NO_DEVICE, DriverError, list_gpus

LISTED = "NVIDIA H200\t150000000000\t149900000000\t9\t0\nNVIDIA L4\t24000000000\t4000000000\t8\t9\n"


def indices(gpus):
    return [gpu.index for gpu in gpus]


def test_gpus_are_numbered_unless_the_environment_names_them():
    assert parse_gpus(LISTED, {}) == (
        Gpu(index="0", name="NVIDIA H200", memory=150000000000, capability=(9, 0)),
        Gpu(index="1", name="NVIDIA L4", memory=24000000000, held=20000000000, capability=(8, 9)),
    )
    assert indices(parse_gpus(LISTED, {"CUDA_VISIBLE_DEVICES": "3, 5"})) == ["3", "5"]
    assert indices(parse_gpus(LISTED, {"CUDA_VISIBLE_DEVICES": "GPU-ab,GPU-cd,9"})) == ["GPU-ab", "GPU-cd"]
    assert parse_gpus("", {"CUDA_VISIBLE_DEVICES": "0"}) == ()


def test_numbers_are_those_of_nvidia_smi_unless_the_environment_orders():
    assert ordered({"A": "b"}) == {"A": "b", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    for env in ({"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}):
        assert ordered(env) == env


def test_gpus_restricts_to_the_named_ones_in_their_order():
    gpus = parse_gpus(LISTED * 2, {})
    assert restrict(gpus, "") == gpus
    assert indices(restrict(gpus, "3,0")) == ["3", "0"]


@pytest.mark.parametrize(
    ("listed", "wanted", "text"),
    [(LISTED, "0,7", "no GPU 7; choose from 0,1"), ("", "0", "no usable GPU; leave --gpus out")],
)
def test_a_gpu_that_is_not_there_is_one_clear_error(listed, wanted, text):
    with pytest.raises(ConfigError, match=text):
        restrict(parse_gpus(listed, {}), wanted)


@pytest.mark.parametrize(
    ("text", "fault"), [("0,,1", "is no list"), ("0, 1", "is no list"), ("1,0,1", "names GPU 1 twice")]
)
def test_a_malformed_list_of_gpus_is_refused_with_its_form(text, fault):
    with pytest.raises(ConfigError, match=fault):
        UpConfig(model="m", gpus=text)


class Driver:
    """A CUDA driver with two GPUs; `failing` names a call and its result."""

    def __init__(self, failing=("", 0)):
        self.failing = failing

    def __getattr__(self, name):
        return lambda *arguments: self.failing[1] if name == self.failing[0] else self.answer(name, arguments)

    def answer(self, name, arguments):
        if name == "cuDeviceGetCount":
            arguments[0]._obj.value = 2
        elif name == "cuDeviceGet":
            arguments[0]._obj.value = arguments[1]
        elif name == "cuDeviceGetName":
            arguments[0].value = b"NVIDIA H200" if arguments[2].value else b"NVIDIA L4"
        elif name == "cuDeviceGetPCIBusId":
            arguments[0].value = b"0000:%02x:00.0" % arguments[2].value
        elif name == "cuDeviceTotalMem_v2":
            arguments[0]._obj.value = 7 << 40
        elif name == "cuDeviceGetAttribute":
            arguments[0]._obj.value = {MAJOR: 9, MINOR: 1}[arguments[1]]
        return 0


class Nvml:
    """NVML with GPUs of `total` bytes, of which `free` are free; `failing` names a call that fails."""

    def __init__(self, total=7 << 40, free=5 << 40, failing=""):
        self.total, self.free, self.failing = total, free, failing

    def __getattr__(self, name):
        return lambda *arguments: 999 if name == self.failing else self.answer(name, arguments)

    def answer(self, name, arguments):
        if name == "nvmlDeviceGetHandleByPciBusId_v2":
            assert arguments[0] in (b"0000:00:00.0", b"0000:01:00.0")
        elif name == "nvmlDeviceGetMemoryInfo":
            arguments[1]._obj.total, arguments[1]._obj.free = self.total, self.free
        return 0


def test_the_driver_is_asked_for_name_memory_and_capability():
    whole = 7 << 40
    assert list_gpus(Driver()) == [("NVIDIA L4", whole, whole, 9, 1), ("NVIDIA H200", whole, whole, 9, 1)]
    assert ctypes.sizeof(ctypes.c_size_t) == 8


def test_free_memory_is_what_nvml_says_of_a_whole_gpu():
    assert {free for _, _, free, *_ in list_gpus(Driver(), Nvml())} == {5 << 40}
    assert {free for _, _, free, *_ in list_gpus(Driver(), Nvml(free=9 << 40))} == {7 << 40}
    assert {free for _, _, free, *_ in list_gpus(Driver(), Nvml(total=70 << 40))} == {7 << 40}, "a MIG slice"


@pytest.mark.parametrize(
    "failing", ["nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetMemoryInfo"]
)
def test_without_nvml_all_memory_counts_as_free(failing):
    assert {free for _, _, free, *_ in list_gpus(Driver(), Nvml(failing=failing))} == {7 << 40}


def test_a_driver_without_gpus_lists_none_and_a_broken_one_says_why():
    assert list_gpus(Driver(("cuInit", NO_DEVICE))) == []
    with pytest.raises(DriverError, match=r"cuInit of libcuda\.so\.1 failed with CUresult 802"):
        list_gpus(Driver(("cuInit", 802)))


def test_a_probe_that_fails_is_a_warning_and_no_gpu(monkeypatch, caplog):
    monkeypatch.setattr(gpu_list, "_has_cuda_torch", lambda: True)
    monkeypatch.setattr(gpu_list.sys, "executable", "/bin/false")
    with caplog.at_level(logging.WARNING):
        assert find_gpus({}) == ()
    assert "the GPUs of this host are not known" in caplog.text


def test_hidden_gpus_are_none(monkeypatch, caplog):
    monkeypatch.setattr(gpu_list, "_has_cuda_torch", lambda: True)
    assert find_gpus({**os.environ, "CUDA_VISIBLE_DEVICES": ""}) == ()
    assert caplog.text == ""
