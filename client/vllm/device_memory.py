"""CUDA memory of another process as a torch tensor, by the driver's virtual memory calls."""

from __future__ import annotations

from typing import Any

import torch

from memshare.wire.errors import InvalidArgument


class DeviceMapping:
    """`num_bytes` of an allocation exported as a POSIX descriptor, mapped for reading and writing.

    Offers `__cuda_array_interface__`, so that torch and CuPy view it without a copy. The mapping
    lives as long as this object; the descriptor may be closed at once.
    """

    def __init__(self, descriptor: int, num_bytes: int, device: int) -> None:
        """Raises `InvalidArgument` naming the driver call that failed and its error."""
        from cuda.bindings import driver  # type: ignore[import-not-found]

        self._driver = driver
        self._call("cuInit", 0)
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = device
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self._call("cuMemGetAllocationGranularity", prop, flag)
        self.num_bytes = num_bytes
        self._size = -(-num_bytes // granularity) * granularity
        self._handle = self._call("cuMemImportFromShareableHandle", descriptor, kind)
        self._address = self._call("cuMemAddressReserve", self._size, granularity, 0, 0)
        self._call("cuMemMap", self._address, self._size, 0, self._handle, 0)
        access = driver.CUmemAccessDesc()
        access.location = prop.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", self._address, self._size, [access], 1)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|i1",
            "data": (int(self._address), False),
            "version": 3,
        }

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._driver, name)(*arguments)
        if int(result) != 0:
            raise InvalidArgument(f"{name} failed with {result.name}: run `memshare doctor`")
        return values[0] if values else None


def map_device(descriptor: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """The allocation behind `descriptor` as an int8 tensor on a CUDA device.

    Raises `InvalidArgument` for another kind of device, or if the driver refuses.
    """
    if device.type != "cuda":
        raise InvalidArgument(f"memshare shares memory of CPUs and CUDA devices, not of {device}")
    mapping = DeviceMapping(descriptor, num_bytes, device.index or 0)
    # The tensor keeps the mapping alive.
    return torch.as_tensor(mapping, device=device)
