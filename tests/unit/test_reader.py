"""Flash readers: every byte, every count, every failure; one suite over the native reader and its reference."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench import _native
from workbench.errors import ReaderError
from workbench.flash.reader import FlashReader, ReadStats, ReferenceReader, _error, aligned_buffer, plan_reads

UNIT = 4096
CHUNK = 64 << 10
SIZE = 3 * (1 << 20) + 1234  # the last unit is cut off by the end of file

AnyReader = FlashReader | ReferenceReader
Make = Callable[..., AnyReader]
ENGINES = ["threads", "io_uring", "buffered"]
READERS: dict[str, Make] = {
    **{engine: lambda engine=engine, **k: FlashReader(engine, **k) for engine in ENGINES},
    "reference": lambda **k: ReferenceReader("threads", **k),
    "reference-buffered": lambda **k: ReferenceReader("buffered", **k),
}


@pytest.fixture(scope="module")
def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, content: np.ndarray) -> Path:
    path = tmp_path_factory.mktemp("reader") / "data.bin"
    content.tofile(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, path: Path) -> Iterator[AnyReader]:
    yield from opened(READERS[request.param], path)


@pytest.fixture(params=["threads", "io_uring"])
def native(request: pytest.FixtureRequest, path: Path) -> Iterator[AnyReader]:
    yield from opened(READERS[request.param], path)


def opened(make: Make, path: Path) -> Iterator[AnyReader]:
    try:
        made = make(depth=8, chunk_bytes=CHUNK) if make is not None else None
    except ReaderError as error:
        pytest.skip(str(error))
    assert made is not None
    with made:
        try:
            made.close_file(made.open(path))
        except ReaderError as error:
            pytest.skip(str(error))
        yield made


def destinations_for(lengths: np.ndarray, align: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Places in a random order that do not overlap, and the size of the buffer."""
    steps = -(-np.maximum(lengths, 1) // align) * align
    order = rng.permutation(len(lengths))
    ends = np.cumsum(steps[order])
    places = np.empty(len(lengths), np.int64)
    places[order] = ends - steps[order]
    return places, int(ends[-1]) if len(ends) else 0


def batch(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """offsets, lengths, alignment of destinations"""
    count = int(rng.integers(1, 120))
    if kind == "aligned":
        offsets = rng.integers(0, SIZE // UNIT - 8, count) * UNIT
        return offsets, rng.integers(1, 8, count) * UNIT, UNIT
    if kind == "strided":
        offsets = rng.choice(SIZE // 1344 - 2, count, replace=False) * 1344
        return np.sort(offsets), np.full(count, 1300), 1344
    if kind == "long":
        offsets = rng.integers(0, SIZE // 2, 4)
        return offsets, rng.integers(CHUNK - 5, 6 * CHUNK, 4), 1
    if kind == "duplicates":
        offsets = np.repeat(rng.integers(0, SIZE - 9000, count), 2)
        return offsets, rng.integers(1, 9000, 2 * count), 1
    if kind == "end":
        lengths = rng.integers(1, 9000, count)
        return SIZE - lengths, lengths, 1
    return rng.integers(0, SIZE - 20000, count), rng.integers(0, 20000, count), 1


KINDS = ["aligned", "strided", "long", "duplicates", "end", "any"]


@pytest.mark.parametrize("gap_bytes", [-1, 0, 5000, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_random_batches_are_read_byte_for_byte(
    reader: AnyReader, path: Path, content: np.ndarray, kind: str, gap_bytes: int
) -> None:
    rng = np.random.default_rng(hash((KINDS.index(kind), gap_bytes)) % 2**32)
    handle = reader.open(path)
    for _ in range(4):
        offsets, lengths, align = batch(kind, rng)
        places, size = destinations_for(lengths, align, rng)
        buffer = aligned_buffer(size)
        buffer.fill(0xA5)
        expected = buffer.copy()
        for offset, length, place in zip(offsets, lengths, places, strict=True):
            expected[place : place + length] = content[offset : offset + length]
        stats = reader.read(handle, offsets, lengths, buffer, places, gap_bytes)
        np.testing.assert_array_equal(buffer, expected)
        plan = plan_reads(offsets, lengths, gap_bytes, CHUNK)
        assert (stats.read_bytes, stats.reads) == (sum(n for _, n in plan), len(plan))


def test_one_batch_after_the_other_on_several_files(
    reader: AnyReader, path: Path, content: np.ndarray, tmp_path: Path
) -> None:
    other = tmp_path / "other.bin"
    other.write_bytes(b"\x07" * (4 * UNIT))
    first, second = reader.open(path), reader.open(other)
    assert first != second
    buffer = aligned_buffer(UNIT)
    for i in range(200):  # a stale worker or queue entry would show
        reader.read(first, [i * UNIT], [UNIT], buffer, [0])
        np.testing.assert_array_equal(buffer, content[i * UNIT : (i + 1) * UNIT])
        reader.read(second, [UNIT], [UNIT], buffer, [0])
        assert np.all(buffer == 7)


@pytest.mark.parametrize("gap_bytes", [-1, 0])
def test_nothing_asked_nothing_read(reader: AnyReader, path: Path, gap_bytes: int) -> None:
    handle = reader.open(path)
    buffer = aligned_buffer(UNIT)
    assert reader.read(handle, [], [], buffer, [], gap_bytes).reads == 0
    stats = reader.read(handle, [5, 100], [0, 0], buffer, [0, 4096], gap_bytes)
    assert (stats.read_bytes, stats.reads) == (0, 0)
    assert not buffer.any()


@pytest.mark.parametrize("gap_bytes", [-1, 0, 8192])
def test_bytes_equal_those_the_kernel_counts(native: AnyReader, path: Path, gap_bytes: int) -> None:
    counters = Path("/proc/self/io")
    if not counters.exists():
        pytest.skip("/proc/self/io is missing: the kernel's own count is needed")
    rng = np.random.default_rng(3)
    handle = native.open(path)
    for kind in ("aligned", "strided", "any", "end"):
        offsets, lengths, align = batch(kind, rng)
        places, size = destinations_for(lengths, align, rng)
        buffer = aligned_buffer(size)
        before = kernel_read_bytes(counters)
        stats = native.read(handle, offsets, lengths, buffer, places, gap_bytes)
        assert kernel_read_bytes(counters) - before == stats.read_bytes


def kernel_read_bytes(counters: Path) -> int:
    match = re.search(r"^read_bytes: (\d+)$", counters.read_text(), re.MULTILINE)
    assert match
    return int(match[1])


def test_truncated_file_is_named(reader: AnyReader, tmp_path: Path) -> None:
    path = tmp_path / "cut.bin"
    path.write_bytes(bytes(10 * UNIT))
    handle = reader.open(path)
    os.truncate(path, 5 * UNIT + 100)
    buffer = aligned_buffer(10 * UNIT)
    offsets = np.arange(10) * UNIT
    message = r"cut\.bin: short read at offset \d+, wanted 4096 bytes, got (0|100); .*workbench verify"
    with pytest.raises(ReaderError, match=message):
        reader.read(handle, offsets, np.full(10, UNIT), buffer, offsets)
    with pytest.raises(ReaderError, match=r"offset 20480, wanted 16384 bytes, got 100"):
        reader.read(handle, [5 * UNIT + 1], [4 * UNIT - 1], buffer, [0])
    # The reader is as good as new afterwards.
    reader.read(handle, offsets[:5], np.full(5, UNIT), buffer, offsets[:5])
    reader.read(handle, [5 * UNIT], [100], buffer, [0])


def test_failures_at_open_are_named(reader: AnyReader, tmp_path: Path) -> None:
    with pytest.raises(ReaderError, match=r"missing\.bin: cannot be opened: No such file"):
        reader.open(tmp_path / "missing.bin")


def test_a_directory_is_refused(reader: AnyReader, tmp_path: Path) -> None:
    buffer = aligned_buffer(UNIT)
    with pytest.raises(ReaderError, match=r"direct I/O|Is a directory"):
        reader.read(reader.open(tmp_path), [0], [UNIT], buffer, [0])


def test_refused_direct_io_offers_buffered() -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("/dev/shm is missing: a tmpfs is needed")
    path = shm / f"workbench-test-{os.getpid()}.bin"
    path.write_bytes(bytes(UNIT))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        pytest.skip("tmpfs accepts direct I/O on this kernel: a file system that refuses it is needed")
    except OSError:
        with FlashReader("threads") as reader, pytest.raises(ReaderError, match=r"refuses direct I/O.*--io buffered"):
            reader.open(path)
    finally:
        path.unlink()


def test_direct_io_refused_at_the_first_read_is_named() -> None:
    # The error that a file system gives when it refuses direct I/O only at the first read.
    native = _native.ReadFailure("direct", "/x/ffn.bundled", 0, 4096, 0, 22)
    assert (
        str(_error(native))
        == "/x/ffn.bundled: the file system refuses direct I/O (Invalid argument); pass --io buffered"
    )


def test_closed_reader_says_so(reader: AnyReader, path: Path) -> None:
    handle = reader.open(path)
    reader.close_file(handle)
    buffer = aligned_buffer(UNIT)
    with pytest.raises(ReaderError, match="closed"):
        reader.read(handle, [0], [UNIT], buffer, [0])
    with pytest.raises(ValueError, match="handle"):
        reader.close_file(handle)
    reader.close()
    reader.close()
    with pytest.raises(ReaderError, match="closed"):
        reader.read(0, [0], [UNIT], buffer, [0])


@pytest.mark.parametrize(
    ("offsets", "lengths", "places", "gap"),
    [
        ([0], [UNIT], [1], -1),
        ([0], [UNIT], [-1], -1),
        ([-1], [UNIT], [0], -1),
        ([0], [-1], [0], -1),
        ([0, 1], [1], [0], -1),
        ([0], [1], [0, 1], -1),
        ([1 << 62], [1], [0], -1),
        ([0.5], [1], [0], -1),
        ([[0]], [1], [0], -1),
        ([0], [1], [0], -2),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    native: AnyReader, path: Path, offsets: list, lengths: list, places: list, gap: int
) -> None:
    handle = native.open(path)
    buffer = aligned_buffer(UNIT)
    with pytest.raises(ValueError):  # noqa: PT011 - one for each case above
        native.read(handle, offsets, lengths, buffer, places, gap)
    assert not buffer.any()


def test_buffers_that_cannot_be_read_into_are_refused(native: AnyReader, path: Path) -> None:
    handle = native.open(path)
    buffer = aligned_buffer(4 * UNIT)
    read_only = buffer[:]
    read_only.flags.writeable = False
    wrongs: list[Any] = [read_only, buffer[::2], buffer.view(np.int32), buffer.reshape(2, -1), buffer[1:]]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="buffer"):
            native.read(handle, [0], [1], wrong, [0])


@pytest.mark.parametrize(("depth", "chunk"), [(0, CHUNK), (32, 0), (32, 5000), (5000, CHUNK)])
def test_settings_are_checked(depth: int, chunk: int) -> None:
    with pytest.raises(ValueError, match=r"depth|chunk_bytes"):
        FlashReader("threads", depth, chunk)


def test_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="one of threads, io_uring, buffered"):
        FlashReader("mmap")  # type: ignore[arg-type]


def test_several_python_threads_share_a_reader(native: AnyReader, path: Path, content: np.ndarray) -> None:
    handle = native.open(path)
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            offsets, lengths, align = batch("strided", rng)
            places, size = destinations_for(lengths, align, rng)
            buffer = aligned_buffer(size)
            native.read(handle, offsets, lengths, buffer, places, 0)
            for offset, length, place in zip(offsets, lengths, places, strict=True):
                if not np.array_equal(buffer[place : place + length], content[offset : offset + length]):
                    failures.append(f"seed {seed} offset {offset}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_forked_child_is_told_to_open_its_own(native: AnyReader, path: Path) -> None:
    handle = native.open(path)
    buffer = aligned_buffer(UNIT)
    native.read(handle, [0], [UNIT], buffer, [0])
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            native.read(handle, [0], [UNIT], buffer, [0])
        except ReaderError as error:
            os.write(send, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(send)
    assert b"belongs to the parent process" in os.read(receive, 1000)
    os.close(receive)


PLANS = [
    # offsets, lengths, gap, chunk, reads
    ([0, 4096], [4096, 4096], -1, 8192, [(0, 4096), (4096, 4096)]),
    ([0, 4096], [4096, 4096], 0, 8192, [(0, 8192)]),
    ([4096, 0], [4096, 4096], 0, 8192, [(0, 8192)]),
    ([4096, 0], [4096, 4096], -1, 8192, [(4096, 4096), (0, 4096)]),
    ([0, 8192], [4096, 4096], 0, 65536, [(0, 4096), (8192, 4096)]),
    ([0, 8192], [4096, 4096], 4095, 65536, [(0, 4096), (8192, 4096)]),
    ([0, 8192], [4096, 4096], 4096, 65536, [(0, 12288)]),
    ([0, 8192], [4096, 4096], 4096, 8192, [(0, 4096), (8192, 4096)]),
    ([10, 20], [5, 5], 0, 4096, [(0, 4096)]),
    ([10, 20], [5, 5], -1, 4096, [(0, 4096), (0, 4096)]),
    ([4000], [200], -1, 8192, [(0, 8192)]),
    ([4000], [200], -1, 4096, [(0, 4096), (4096, 4096)]),
    ([0], [20000], -1, 8192, [(0, 8192), (8192, 8192), (16384, 4096)]),
    ([0, 20480], [20480, 4096], 0, 8192, [(0, 8192), (8192, 8192), (16384, 8192)]),
    ([0, 0], [20480, 20480], 0, 8192, [(0, 8192), (8192, 8192), (16384, 4096)]),
    ([0, 4096, 0], [12288, 4096, 4096], 0, 65536, [(0, 12288)]),
    ([7, 9], [0, 0], 0, 4096, []),
]


@pytest.mark.parametrize("case", range(len(PLANS)))
def test_plan_is_as_documented(case: int) -> None:
    offsets, lengths, gap, chunk, reads = PLANS[case]
    assert plan_reads(offsets, lengths, gap, chunk) == reads


@pytest.mark.parametrize("case", range(len(PLANS)))
def test_native_plan_is_as_documented(case: int) -> None:
    offsets, lengths, gap, chunk, reads = PLANS[case]
    assert _native.plan_reads(np.array(offsets, np.int64), np.array(lengths, np.int64), gap, chunk) == reads


def test_native_plan_equals_the_reference_on_random_batches() -> None:
    rng = np.random.default_rng(11)
    for _ in range(300):
        offsets, lengths, _ = batch(str(rng.choice(KINDS)), rng)
        gap, chunk = int(rng.choice([-1, 0, 1, 4096, 40000])), UNIT << int(rng.integers(0, 6))
        expected = plan_reads(offsets, lengths, gap, chunk)
        assert _native.plan_reads(offsets.astype(np.int64), lengths.astype(np.int64), gap, chunk) == expected


def test_stats_add_up() -> None:
    assert ReadStats(1, 2, 0.5) + ReadStats(10, 20, 0.25) == ReadStats(11, 22, 0.75)


@pytest.mark.parametrize("nbytes", [0, 1, UNIT, 5 * UNIT + 1])
def test_aligned_buffer(nbytes: int) -> None:
    buffer = aligned_buffer(nbytes)
    assert buffer.dtype == np.uint8
    assert buffer.shape == (nbytes,)
    assert buffer.ctypes.data % UNIT == 0
    assert not buffer.any()
    buffer[:] = 1
