"""The pool as vLLM's memory, and the CUDA driver's calls over a stand-in."""

from __future__ import annotations

import enum
import sys
import types

import pytest
import torch

from memshare.client.vllm.device_memory import DeviceMapping, map_device
from memshare.client.vllm.memory import EnginePool, PoolAllocation
from memshare.client.vllm.settings import Settings
from memshare.wire.errors import InvalidArgument


@pytest.fixture
def engine_pool(pool):
    return EnginePool(Settings(runtime_dir=str(pool.runtime.path)))


def test_one_allocation_is_served_and_all_others_are_vllms_own(engine_pool):
    with PoolAllocation(engine_pool):
        own = torch.zeros(16, dtype=torch.float32)
        cache = torch.zeros(4096, dtype=torch.int8, device=torch.device("cpu"))
        with pytest.raises(InvalidArgument, match="asked for two KV caches"):
            torch.zeros(16, dtype=torch.int8)
    assert cache.data_ptr() == engine_pool.address != own.data_ptr()
    cache[:] = 7
    assert int(cache.sum()) == 7 * 4096


def test_a_cache_that_does_not_fit_is_refused_with_both_sizes(engine_pool):
    with (
        PoolAllocation(engine_pool),
        pytest.raises(InvalidArgument, match=f"needs {1 << 40} bytes, the pool has"),
    ):
        torch.zeros(1 << 40, dtype=torch.int8)


class _Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_PERMITTED = 800


class _Driver(types.ModuleType):
    """Records the calls that `DeviceMapping` makes; `failing` names one that is refused."""

    def __init__(self, failing: str = "") -> None:
        super().__init__("cuda.bindings.driver")
        self.failing = failing
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.CUmemAllocationHandleType = types.SimpleNamespace(
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1
        )
        self.CUmemAllocationType = types.SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
        self.CUmemLocationType = types.SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
        self.CUmemAllocationGranularity_flags = types.SimpleNamespace(
            CU_MEM_ALLOC_GRANULARITY_MINIMUM=0
        )
        self.CUmemAccess_flags = types.SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
        self.CUmemAllocationProp = lambda: types.SimpleNamespace(location=types.SimpleNamespace())
        self.CUmemAccessDesc = types.SimpleNamespace

    def __getattr__(self, name: str) -> object:
        if not name.startswith("cu"):
            raise AttributeError(name)
        answers = {
            "cuMemGetAllocationGranularity": 2 << 20,
            "cuMemImportFromShareableHandle": 77,
            "cuMemAddressReserve": 0x7F00_0000_0000,
        }

        def call(*arguments: object) -> tuple[object, ...]:
            self.calls.append((name, arguments))
            if name == self.failing:
                return (_Result.CUDA_ERROR_NOT_PERMITTED,)
            value = answers.get(name)
            return (_Result.CUDA_SUCCESS,) if value is None else (_Result.CUDA_SUCCESS, value)

        return call


@pytest.fixture
def driver(monkeypatch):
    def install(failing: str = "") -> _Driver:
        fake = _Driver(failing)
        bindings = types.ModuleType("cuda.bindings")
        bindings.driver = fake
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        return fake

    return install


def test_device_memory_is_imported_mapped_and_made_accessible(driver):
    fake = driver()
    mapping = DeviceMapping(5, 3 << 20, 1)
    assert [name for name, _ in fake.calls] == [
        "cuInit", "cuMemGetAllocationGranularity", "cuMemImportFromShareableHandle",
        "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
    ]  # fmt: skip
    calls = dict(fake.calls)
    assert calls["cuMemImportFromShareableHandle"] == (5, 1)
    # Whole units of the driver's granularity.
    assert calls["cuMemMap"] == (0x7F00_0000_0000, 4 << 20, 0, 77, 0)
    (access,) = calls["cuMemSetAccess"][2]
    assert (access.location.id, access.flags) == (1, 3)
    view = mapping.__cuda_array_interface__
    assert (view["shape"], view["typestr"]) == ((3 << 20,), "|i1")
    assert view["data"] == (0x7F00_0000_0000, False)


def test_a_refused_import_names_the_call_and_what_to_run(driver):
    driver("cuMemImportFromShareableHandle")
    with pytest.raises(
        InvalidArgument,
        match=r"cuMemImportFromShareableHandle failed with CUDA_ERROR_NOT_PERMITTED.*doctor",
    ):
        DeviceMapping(5, 1 << 20, 0)


def test_other_devices_are_refused():
    with pytest.raises(InvalidArgument, match="not of xpu"):
        map_device(5, 1 << 20, torch.device("xpu:0"))
