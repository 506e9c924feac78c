"""A job waits for the record of every captured sequence, and ends when one cannot come."""

import asyncio
import errno
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3_pipeline.engine import jobs
from eagle3_pipeline.engine.backend import CaptureTarget
from eagle3_pipeline.engine.jobs import GenerateJob, read_journal
from eagle3_pipeline.errors import CaptureError, DiskSpaceError, StoreError
from eagle3_pipeline.store.records import RecordReader
from eagle3_pipeline_tests.engine.conftest import HIDDEN, LAYER_IDS, PROMPTS, JobMaker, capturing_spec
from eagle3_pipeline_tests.fake_engine import FakeBackend

ROW_BYTES = len(LAYER_IDS) * HIDDEN * 2


class _SilentBackend(FakeBackend):
    """Answers; no record comes of some sequences."""

    def __init__(self, *silent: str) -> None:
        super().__init__()
        self._silent = silent

    def _write(self, capture: CaptureTarget, rows: list[int], num_prompt: int) -> None:
        if capture.sequence_id not in self._silent:
            super()._write(capture, rows, num_prompt)


def _run(job: GenerateJob, *silent: str) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        backend = _SilentBackend(*silent)
        await backend.start(capturing_spec())
        return await jobs.run_job(job, backend, capturing_spec(), "job", AsyncMock())

    return asyncio.run(asyncio.wait_for(run(), 20))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_STALL_CHECK_S", 0.05)
    monkeypatch.setattr(jobs, "_WRITE_STALL_S", 0.5)


def _free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(jobs.shutil, "disk_usage", lambda _: SimpleNamespace(free=num_bytes))


def test_states_that_never_come_are_told_of_and_the_others_kept(
    make_job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(capture=True)
    # s4 has 3 prompt tokens and 5 sampled ones: 7 rows.
    _free(monkeypatch, 7 * ROW_BYTES)
    with pytest.raises(CaptureError, match="sequence s4 were not written to .*; 336 bytes are free"):
        _run(job, "s4")
    assert set(read_journal(Path(job.journal))) == set(PROMPTS) - {"s4"}


def test_a_disk_without_room_for_any_of_those_that_wait_is_full(
    make_job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the two that wait s0, the older one, has fewer rows, which would fit.
    assert len(PROMPTS["s0"]) < len(PROMPTS["s4"]) and len(PROMPTS["s4"]) == 3
    _free(monkeypatch, 7 * ROW_BYTES - 1)
    with pytest.raises(DiskSpaceError, match="sequence s4 were not written to .*: 335 bytes are free .* run again"):
        _run(make_job(capture=True), "s0", "s4")


def test_an_error_of_reading_records_ends_the_job(make_job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: RecordReader) -> list:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    job = make_job(capture=True)
    monkeypatch.setattr(jobs._Runner, "find_captured", AsyncMock())
    monkeypatch.setattr(RecordReader, "read", read)
    with pytest.raises(StoreError, match=f"captured states in {job.capture_folder}: .*Input/output error"):
        _run(job)


def test_a_folder_that_is_removed_while_a_job_waits_ends_it(
    make_job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(capture=True)

    def check(runner: jobs._Runner) -> None:
        shutil.rmtree(job.capture_folder)
        original(runner)

    original = jobs._Runner._check_stall
    monkeypatch.setattr(jobs._Runner, "_check_stall", check)
    with pytest.raises(StoreError, match="No such file or directory"):
        _run(job, "s4")


def test_a_process_that_was_stopped_for_a_while_has_not_waited(
    make_job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, checks = make_job(capture=True), list[None]()

    def check(runner: jobs._Runner) -> None:
        checks.append(None)
        original(runner)
        # As much time as it may take at most goes by between two looks.
        clock[0] += 2 * jobs._WRITE_STALL_S

    clock, original = [0.0], jobs._Runner._check_stall
    monkeypatch.setattr(jobs._Runner, "_check_stall", check)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + clock[0]))
    with pytest.raises(CaptureError, match="within 0 s|within 1 s"):
        _run(job, "s4")
    assert len(checks) >= jobs._WRITE_STALL_S / jobs._STALL_CHECK_S


def test_a_sequence_that_is_asked_for_twice_is_answered_twice(make_job: JobMaker) -> None:
    job = make_job(capture=True)
    table = pa.table({"sequence_id": ["a", "a"], "input_ids": [[1, 2], [1, 2]]})
    pq.write_table(table, job.prompts)
    assert _run(job)["done"] == 2
