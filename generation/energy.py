"""Joules of a run, from the energy counters of the hardware (--energy of generate.py).

    counter = open_counter(torch.device("cuda"))
    before = counter(); run(); joules = counter() - before

    NVML   nvmlDeviceGetTotalEnergyConsumption: what a GPU has used since its driver was loaded, in
           millijoules, since Volta. Read by ctypes from the driver's own library.
    RAPL   /sys/class/powercap: microjoules of each CPU package and, where it is counted apart, its
           memory. A counter wraps around at max_energy_range_uj (20 minutes at 200 W): two readings
           further apart lose whole turns.

ML.ENERGY's leaderboard and LLM-Perf report joules per generated token: the energy of a run over its
new tokens, prefill included. It is the device's energy and not the process's: idle power and other
processes on it are counted, the rest of the machine (fans, power supply) is not. A GPU's counter is
updated about every 100 ms (ML.ENERGY's blog), so runs of a second are measured badly; an A100 or
H100 samples its power a quarter of the time (arXiv:2312.02741).

When it loses: in virtual machines and containers, which have neither counter; RAPL is readable by
root alone unless permitted (since CVE-2020-8694): `chmod a+r /sys/class/powercap/*/energy_uj`.

Equivalence (test_all.py): on a folder and a library that count as a test says, the joules are those
of the test, across a wrap. `python generation/energy.py` prints the watts of a second.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")
NVML_LIBRARY = "libnvidia-ml.so.1"


def open_counter(device: torch.device) -> Callable[[], float]:
    """Returns a function: joules that the device has used since some time in the past. ValueError
    says why there is none."""
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        return nvml_counter(f"{p.pci_domain_id:08x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0")
    return rapl_counter(POWERCAP)


def nvml_counter(pci_id: str) -> Callable[[], float]:
    """open_counter of the GPU with this PCI bus id: device numbers may be other ones in NVML."""
    try:
        nvml = ctypes.CDLL(NVML_LIBRARY)
    except OSError:
        raise ValueError(f"NVML: no {NVML_LIBRARY}") from None
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()

    def call(name: str, *args: object) -> None:
        if (code := getattr(nvml, name)(*args)) != 0:
            raise ValueError(f"NVML: {name} returned error {code}")

    def joules() -> float:
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByPciBusId_v2", pci_id.encode(), ctypes.byref(handle))
    joules()
    return joules


def rapl_counter(powercap: Path) -> Callable[[], float]:
    """open_counter of all CPU packages and their memory."""
    zones = []
    for zone in sorted(powercap.glob("intel-rapl:*")):  # AMD's have this name too
        if (zone / "name").read_text().startswith(("package", "dram")):
            zones.append(zone)
    if not zones:
        raise ValueError(f"RAPL: {powercap} has no CPU package")
    read = lambda zone, name: int((zone / name).read_text())
    try:
        ranges = [read(zone, "max_energy_range_uj") for zone in zones]
        last = [read(zone, "energy_uj") for zone in zones]
    except OSError as e:
        raise ValueError(f"RAPL: {e.filename}: {e.strerror}") from None
    total = 0

    def joules() -> float:
        nonlocal total
        for i, zone in enumerate(zones):
            now = read(zone, "energy_uj")
            total += (now - last[i]) % ranges[i]
            last[i] = now
        return total / 1e6

    return joules


def main() -> None:
    """Watts of the first device, over a second in which this process sleeps."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        counter = open_counter(device)
    except ValueError as e:
        return print(f"no energy counter: {e}")
    before, start = counter(), time.perf_counter()
    time.sleep(1.0)
    print(f"{device}: {(counter() - before) / (time.perf_counter() - start):.1f} W")


if __name__ == "__main__":
    main()
