"""Joules from RAPL's files and NVML's calls, both made up; nothing where a machine has neither."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import pytest
from test_report_records import ablation_record

from workbench.experiments.energy import NOT_MEASURED, SAMPLE_SECONDS, Energy, EnergyMeter, Nvml, Rapl
from workbench.report import ablation_table, read_ablation, to_markdown

SPAN = 262_143_328_850


def zone(root: Path, name: str, kind: str, microjoules: int, span: int = SPAN) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(kind + "\n")
    (folder / "max_energy_range_uj").write_text(f"{span}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


class FakeNvml:
    """The library's calls that are made: a counter in millijoules, or power in milliwatts where `counter` is None."""

    def __init__(self, counter: int | None = 0, power: int = 0, missing: bool = False) -> None:
        self.counter, self.power, self.missing, self.asked = counter, power, missing, []

    def nvmlInit_v2(self) -> int:
        return 9 if self.missing else 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        self.asked.append(index.value)
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, device: Any) -> int:
        self.asked.append(name)
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, value: Any) -> int:
        if self.counter is None:
            return 3
        ctypes.cast(value, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.counter
        return 0

    def nvmlDeviceGetPowerUsage(self, device: Any, value: Any) -> int:
        ctypes.cast(value, ctypes.POINTER(ctypes.c_uint))[0] = self.power
        return 0


def test_packages_and_their_dram_are_added_and_nothing_twice(tmp_path: Path) -> None:
    packages = [zone(tmp_path, f"intel-rapl:{i}", f"package-{i}", 1_000_000) for i in range(2)]
    dram = zone(tmp_path, "intel-rapl:0:1", "dram", 500_000)
    others = [
        zone(tmp_path, "intel-rapl:0:0", "core", 0),
        zone(tmp_path, "intel-rapl:2", "psys", 0),
        zone(tmp_path, "intel-rapl-mmio:0", "package-0", 0),
    ]
    meter = EnergyMeter(root=tmp_path)
    with meter:
        for counter in (*packages, *others):
            counter.write_text("3000000")
        dram.write_text("600000")
    assert (meter.energy.joules, meter.energy.source) == (pytest.approx(4.1), "CPU and DRAM by RAPL")


def test_a_counter_that_begins_again_goes_on(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", SPAN - 1_000_000)
    rapl = Rapl(tmp_path)
    counter.write_text("2000000")
    assert rapl.joules() == pytest.approx(3.0)
    counter.write_text("1000000")
    assert rapl.joules() == pytest.approx(3.0 + (SPAN - 1_000_000) / 1e6)


def test_a_counter_that_only_root_may_read_is_not_measured(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    counter.unlink()
    counter.mkdir()  # unreadable for root too
    with EnergyMeter(root=tmp_path) as meter:
        pass
    assert meter.energy == Energy(None, NOT_MEASURED)


def test_a_machine_without_counters_is_not_measured(tmp_path: Path) -> None:
    def none() -> Nvml:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    with EnergyMeter(gpu=True, root=tmp_path / "none", nvml=none) as meter:
        meter.read()
    assert meter.energy == Energy(None, NOT_MEASURED)


def test_a_gpu_has_a_counter_in_millijoules(tmp_path: Path) -> None:
    library = FakeNvml(counter=10_000)
    with EnergyMeter(gpu=True, root=tmp_path, nvml=lambda: Nvml(library, visible="3,1")) as meter:
        library.counter = 12_500
    assert library.asked == [3]
    assert (meter.energy.joules, meter.energy.source) == (pytest.approx(2.5), "GPU by NVML, CPU not measured")


def test_a_gpu_and_the_processor_are_added(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    library = FakeNvml()
    with EnergyMeter(gpu=True, root=tmp_path, nvml=lambda: Nvml(library, visible="GPU-abc")) as meter:
        library.counter = 1_000
        counter.write_text("2000000")
    assert library.asked == [b"GPU-abc"]
    assert (meter.energy.joules, meter.energy.source) == (pytest.approx(3.0), "CPU by RAPL, GPU by NVML")


def test_a_gpu_without_a_counter_is_sampled(tmp_path: Path) -> None:
    library = FakeNvml(counter=None, power=100_000)
    began = time.perf_counter()
    with EnergyMeter(gpu=True, root=tmp_path, nvml=lambda: Nvml(library, visible="")) as meter:
        while meter.energy.joules in (None, 0.0):
            time.sleep(SAMPLE_SECONDS)
            meter.read()
    assert "sampled" in meter.energy.source
    assert meter.energy.joules is not None
    assert 0 < meter.energy.joules <= 100 * (time.perf_counter() - began)


def test_nvml_without_a_gpu_counts_the_processor_and_says_so(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    with EnergyMeter(gpu=True, root=tmp_path, nvml=lambda: Nvml(FakeNvml(missing=True), visible="")) as meter:
        counter.write_text("1000000")
    assert (meter.energy.joules, meter.energy.source) == (pytest.approx(1.0), "CPU by RAPL, GPU not measured")


def test_it_counts_from_its_last_restart(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    with EnergyMeter(root=tmp_path) as meter:
        counter.write_text("5000000")
        meter.restart()
        assert meter.energy.joules == 0
        counter.write_text("7000000")
    assert meter.energy.joules == pytest.approx(2.0)


def test_the_table_has_tokens_a_joule_where_they_were_measured() -> None:
    record = ablation_record()
    assert "a joule" not in to_markdown(ablation_table(read_ablation(record)))
    for row in record["rows"]:
        row |= {"energy_j_per_token": 0.25, "energy_source": "CPU by RAPL"}
    table = to_markdown(ablation_table(read_ablation(record)))
    assert "a joule" in table
    assert "Energy: CPU by RAPL." in table
    record["rows"][0] |= {"energy_j_per_token": None, "energy_source": NOT_MEASURED}
    assert "not measured" in to_markdown(ablation_table(read_ablation(record)))
