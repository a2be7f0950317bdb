"""Joules of a stretch of work: the processor's by RAPL, a GPU's by NVML, where the machine offers them (section 5.3).

Both are counters of the whole chip: what else runs there counts too. Nothing is estimated: what cannot be read is 'not
measured'.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"
NOT_MEASURED = "not measured"
SAMPLE_SECONDS = 0.05
"""How often a GPU is asked for its power where it has no counter of energy."""


@dataclass(frozen=True)
class Energy:
    """`joules` of a stretch, None where nothing could be read; `source`: of what and by what, or 'not measured'."""

    joules: float | None
    source: str


class Rapl:
    """The processor packages' counters, and those of their DRAM, which is not part of a package's.

    `zones`: (counter, its range) in microjoules. The counters begin again at 0 after their range, in tens of minutes at
    full load: `read` at least that often.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self.zones: list[tuple[Path, int]] = []
        self.parts: list[str] = []
        found = sorted(root.glob("intel-rapl:*")) if root.is_dir() else []
        for zone in found:
            try:
                name, span = (zone / "name").read_text().strip(), int((zone / "max_energy_range_uj").read_text())
                int((zone / "energy_uj").read_text())
            except (OSError, ValueError):
                continue  # since 2020 only root may read it
            package = name.startswith("package") and zone.name.count(":") == 1
            if package or name == "dram":
                self.zones.append((zone / "energy_uj", span))
                self.parts.append("DRAM" if name == "dram" else "CPU")
        self._last = self._counters()
        self._total = 0

    @property
    def source(self) -> str:
        """What is counted; empty where nothing is."""
        return f"{' and '.join(sorted(set(self.parts)))} by RAPL" if self.zones else ""

    def _counters(self) -> list[int]:
        return [int(counter.read_text()) for counter, _ in self.zones]

    def joules(self) -> float:
        """Since it was made."""
        now = self._counters()
        for before, after, (_, span) in zip(self._last, now, self.zones, strict=True):
            self._total += after - before if after >= before else after - before + span
        self._last = now
        return self._total / 1e6


class Nvml:
    """A GPU's energy: its counter where it has one (Volta and later), else its power, sampled. `library`: NVML as
    ctypes loads it; OSError where it is not there or has no such GPU."""

    def __init__(self, library: Any = None, visible: str | None = None) -> None:
        self._library = library or ctypes.CDLL(NVML)
        self._checked("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        chosen = (visible if visible is not None else os.environ.get("CUDA_VISIBLE_DEVICES", "")).split(",")[0].strip()
        if chosen.startswith("GPU-"):
            self._checked("nvmlDeviceGetHandleByUUID", chosen.encode(), ctypes.byref(self._device))
        else:
            index = ctypes.c_uint(int(chosen) if chosen.isdigit() else 0)
            self._checked("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(self._device))
        self._stop: threading.Event | None = None
        self._sampled = 0.0
        try:
            self._first = self._counter()
            self.source = "GPU by NVML"
        except OSError:
            self._power()
            self._first = None
            self.source = f"GPU by NVML's power, sampled every {SAMPLE_SECONDS * 1000:.0f} ms"
            self._stop = threading.Event()
            threading.Thread(target=self._sample, args=(self._stop,), daemon=True).start()

    def _checked(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise OSError(f"NVML: {name} gave status {status}")

    def _counter(self) -> int:
        value = ctypes.c_ulonglong()
        self._checked("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(value))
        return value.value

    def _power(self) -> int:
        value = ctypes.c_uint()
        self._checked("nvmlDeviceGetPowerUsage", self._device, ctypes.byref(value))
        return value.value

    def _sample(self, stop: threading.Event) -> None:
        before = time.perf_counter()
        while not stop.wait(SAMPLE_SECONDS):
            now = time.perf_counter()
            self._sampled += self._power() / 1000 * (now - before)
            before = now

    def joules(self) -> float:
        """Since it was made."""
        return self._sampled if self._first is None else (self._counter() - self._first) / 1000

    def close(self) -> None:
        """End the sampling."""
        if self._stop is not None:
            self._stop.set()
        self._checked("nvmlShutdown")


class EnergyMeter:
    """Measures what happens within `with`, or since `restart`; `energy` says it afterwards. gpu: count a GPU's too.
    `read`, now and then, keeps counters from running over unseen."""

    def __init__(self, *, gpu: bool = False, root: Path = POWERCAP, nvml: Callable[[], Nvml] = Nvml) -> None:
        self._gpu, self._root, self._open = gpu, root, nvml
        self._rapl: Rapl | None = None
        self._nvml: Nvml | None = None
        self._before: list[float] = []
        self.energy = Energy(None, NOT_MEASURED)

    def __enter__(self) -> Self:
        self._nvml = None
        if self._gpu:
            try:
                self._nvml = self._open()
            except OSError:
                self._nvml = None
        self._rapl = Rapl(self._root)
        self.restart()
        return self

    def restart(self) -> None:
        """Count from now on, as if it had been entered now."""
        self._before = [meter.joules() for meter in self._meters()]
        self.read()

    def _meters(self) -> list[Rapl | Nvml]:
        return [meter for meter in (self._rapl, self._nvml) if meter is not None and meter.source]

    def read(self) -> None:
        """Bring `energy` up to now."""
        meters = self._meters()
        if meters:
            missing = []
            if self._rapl is None or not self._rapl.source:
                missing.append("CPU not measured")
            if self._gpu and self._nvml is None:
                missing.append("GPU not measured")
            said = ", ".join([meter.source for meter in meters] + missing)
            spent = sum(meter.joules() for meter in meters) - sum(self._before)
            self.energy = Energy(spent, said)

    def __exit__(self, *_: object) -> None:
        try:
            self.read()
        finally:
            if self._nvml is not None:
                self._nvml.close()
            self._rapl = self._nvml = None
