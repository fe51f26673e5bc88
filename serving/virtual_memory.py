"""Virtual memory that is reserved first and committed page by page, on Linux and on CUDA GPUs.

A tensor that will grow, such as a KV cache, is allocated at its final size or copied when it grows.
With the calls of the operating system, or of CUDA's driver, it needs neither: a range of addresses
is reserved, at no cost, and physical pages are created and mapped into it when they are needed, at
any place and in any order, also one page at several places (vAttention, arXiv:2405.04437; PyTorch's
expandable segments). Tensors over a range stay valid meanwhile.

Linux: the pages are a memfd; fallocate commits them and punches holes, mmap maps them into ranges
without access. Others count them as shared memory. CUDA: cuMemAddressReserve, cuMemCreate,
cuMemMap and cuMemSetAccess of the driver, by ctypes; a page is a multiple of 2 MiB. There, a write
is visible at a page's other addresses to kernels that start after it has ended, as on a stream.

Cost: a few microseconds for a call, and the time to clear a page. When it loses: pages of 4 KiB
have more TLB misses than the large ones of a plain allocation; Linux limits a process to 65,530
mappings (vm.max_map_count), and each page that does not follow its neighbour is one.
Used by serving/vattention.py. test_all.py compares with what the kernel counts, and runs the CUDA
calls on a simulated driver; on an H100 `python -m serving.virtual_memory` has passed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

READ_WRITE = 0x3  # PROT_NONE is 0
SHARED, FIXED = 0x1, 0x10
RESERVE = 0x4022  # private, anonymous, no swap space
PUNCH_HOLE = 0x3  # of fallocate; the file keeps its size


class HostMemory:
    """num_pages physical pages on Linux, of which none is committed at first.

    All pages have addresses from `pool` on. They can be mapped to further addresses, in ranges from
    `reserve`, and must be unmapped there before they are freed. MemoryError if the system has no
    memory, addresses or mappings left. All is released with the last tensor."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device):
        self.page_bytes, self.committed = page_bytes, {}  # page number: None
        self.ranges: list[tuple[int, int]] = []  # address, bytes
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = c_void_p
        self.libc.mmap.argtypes = c_void_p, c_size_t, c_int, c_int, c_int, c_size_t
        self.libc.munmap.argtypes = c_void_p, c_size_t
        self.libc.fallocate.argtypes = c_int, c_int, c_size_t, c_size_t
        self.fd = os.memfd_create("kv_cache")
        self.pool = self.reserve(num_pages * page_bytes)
        self._mmap(self.pool, num_pages * page_bytes, READ_WRITE, SHARED | FIXED, self.fd)

    @staticmethod
    def granularity(device: torch.device) -> int:
        """Bytes of which a page is a multiple."""
        return mmap.PAGESIZE

    def reserve(self, nbytes: int) -> int:
        """The address of a new range of addresses."""
        address = self._mmap(None, nbytes, 0, RESERVE)
        self.ranges.append((address, nbytes))
        return address

    def commit(self, page: int) -> None:
        if page not in self.committed:
            if self.libc.fallocate(self.fd, 0, page * self.page_bytes, self.page_bytes):
                raise _os_memory_error("fallocate", self.page_bytes)
            self.committed[page] = None

    def free(self, page: int) -> None:
        """Give a page back to the system. Its content is lost."""
        del self.committed[page]
        self.libc.fallocate(self.fd, PUNCH_HOLE, page * self.page_bytes, self.page_bytes)

    def map(self, address: int, page: int) -> None:
        at = page * self.page_bytes
        self._mmap(address, self.page_bytes, READ_WRITE, SHARED | FIXED, self.fd, at)

    def unmap(self, address: int) -> None:
        self._mmap(address, self.page_bytes, 0, RESERVE | FIXED)

    def tensor(self, address: int, nbytes: int) -> Tensor:
        """(nbytes,) uint8 at an address, where a page must be mapped. It keeps this alive."""
        data = (ctypes.c_uint8 * nbytes).from_address(address)
        data.memory = self
        return torch.frombuffer(data, dtype=torch.uint8)

    def synchronize(self) -> None:
        """Called before pages are unmapped, to wait for kernels that use them: here none run."""

    def _mmap(self, address: int | None, nbytes: int, access: int, flags: int, fd=-1, at=0) -> int:
        found = self.libc.mmap(address, nbytes, access, flags, fd, at)
        if found == c_void_p(-1).value:
            raise _os_memory_error("mmap", nbytes)
        return found

    def __del__(self):
        for address, nbytes in self.ranges:
            self.libc.munmap(address, nbytes)
        if hasattr(self, "fd"):
            self.libc.close(self.fd)  # os may be gone, if the process exits


def _os_memory_error(call: str, nbytes: int) -> MemoryError:
    return MemoryError(f"{call} of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")


class _Location(ctypes.Structure):
    """CUmemLocation. type 1: a device."""

    _fields_ = [("type", c_int), ("id", c_int)]


class _AllocationProp(ctypes.Structure):
    """CUmemAllocationProp. type 1: pinned."""

    _fields_ = [("type", c_int), ("handle_types", c_int), ("location", _Location)]
    _fields_ += [("win32_handle", c_void_p), ("flags", ctypes.c_uint8 * 8)]


class _AccessDesc(ctypes.Structure):
    """CUmemAccessDesc. flags 3: read and write."""

    _fields_ = [("location", _Location), ("flags", c_int)]


OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


@cache
def load_driver() -> Any:
    """libcuda, initialized."""
    torch.cuda.init()
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *args: Any) -> int:
    """Call a CUDA function: its CUresult. All integers are passed as 64 bits: sizes, addresses,
    handles and flags are, and ctypes would pass 32."""
    return getattr(load_driver(), name)(*(c_uint64(x) if isinstance(x, int) else x for x in args))


class CudaMemory:
    """HostMemory's methods for the memory of a GPU."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device):
        self.page_bytes, self.committed = page_bytes, {}  # page number: handle
        self.ranges: list[tuple[int, int]] = []
        self.mapped: set[int] = set()  # addresses
        self.device, self.location = device, _Location(1, device.index or 0)
        self.pool = self.reserve(num_pages * page_bytes)

    @staticmethod
    def granularity(device: torch.device) -> int:
        nbytes, prop = c_uint64(), _AllocationProp(1, 0, _Location(1, device.index or 0))
        if code := call_driver("cuMemGetAllocationGranularity", byref(nbytes), byref(prop), 0):
            raise ValueError(f"{device} has no virtual memory management: CUresult {code}")
        return nbytes.value

    def reserve(self, nbytes: int) -> int:
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
        self.ranges.append((address.value, nbytes))
        return address.value

    def commit(self, page: int) -> None:
        if page in self.committed:
            return
        handle, prop = c_uint64(), _AllocationProp(1, 0, self.location)
        self._call("cuMemCreate", byref(handle), self.page_bytes, byref(prop), 0)
        try:
            self._map(self.pool + page * self.page_bytes, handle.value)
        except (MemoryError, RuntimeError):
            self._call("cuMemRelease", handle.value)
            raise
        self.committed[page] = handle.value

    def free(self, page: int) -> None:
        self.unmap(self.pool + page * self.page_bytes)
        self._call("cuMemRelease", self.committed.pop(page))

    def map(self, address: int, page: int) -> None:
        self._map(address, self.committed[page])

    def _map(self, address: int, handle: int) -> None:
        self._call("cuMemMap", address, self.page_bytes, 0, handle, 0)
        self.mapped.add(address)
        access = _AccessDesc(self.location, 3)
        try:
            self._call("cuMemSetAccess", address, self.page_bytes, byref(access), 1)
        except (MemoryError, RuntimeError):
            self.unmap(address)
            raise

    def unmap(self, address: int) -> None:
        self._call("cuMemUnmap", address, self.page_bytes)
        self.mapped.remove(address)

    def tensor(self, address: int, nbytes: int) -> Tensor:
        array = dict(shape=(nbytes,), typestr="|u1", data=(address, False), version=3)
        owner = SimpleNamespace(__cuda_array_interface__=array, memory=self)
        return torch.as_tensor(owner, device=self.device)  # not copied

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _call(self, name: str, *args: Any) -> None:
        if code := call_driver(name, *args):
            kind = MemoryError if code == OUT_OF_MEMORY else RuntimeError
            raise kind(f"{name}: CUresult {code}")

    def __del__(self):
        with suppress(RuntimeError):  # of a process that exits, the driver may be gone
            self.synchronize()
            for address in list(self.mapped):
                self.unmap(address)
            for handle in self.committed.values():
                self._call("cuMemRelease", handle)
            for address, nbytes in self.ranges:
                self._call("cuMemAddressFree", address, nbytes)


def memory_class(device: torch.device) -> type[HostMemory] | type[CudaMemory]:
    """ValueError if the system cannot map memory."""
    if device.type == "cuda":
        return CudaMemory
    if device.type != "cpu" or not hasattr(os, "memfd_create"):
        raise ValueError(f"memory is mapped on Linux and CUDA GPUs, not on {device} here")
    return HostMemory


def main() -> None:
    """Pages mapped in reverse order read as one tensor; microseconds of each call."""
    from time import perf_counter

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    print(f"{'median us':>12}{'commit':>10}{'map':>10}{'unmap':>10}{'free':>10}")
    for kib in (64, 2048) if device.type == "cpu" else (2048, 8192):
        n, size = 64, kib << 10
        memory = memory_class(device)(n, size, device)
        base, pages = memory.reserve(n * size), range(n)[::-1]
        calls = [(memory.commit, [(p,) for p in pages])]
        calls += [(memory.map, [(base + i * size, p) for i, p in enumerate(pages)])]
        calls += [(memory.unmap, [(base + i * size,) for i in range(n)])]
        line = f"{kib:8} KiB"
        for call, all_args in (*calls, (memory.free, [(p,) for p in pages])):
            times = []
            for args in all_args:
                start = perf_counter()
                call(*args)
                times.append(perf_counter() - start)
            line += f"{1e6 * sorted(times)[n // 2]:10.1f}"
            if call == memory.map:
                range_, pool = (memory.tensor(at, n * size) for at in (base, memory.pool))
                range_.view(n, size).copy_(torch.arange(n, device=device)[:, None])
                assert torch.equal(pool.view(n, size), range_.view(n, size).flip(0))
                memory.synchronize()
        print(line)


if __name__ == "__main__":
    main()
