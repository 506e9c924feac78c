"""A job of the host: answers every prompt of a chunk, journals finished rows, waits until captured rows are written."""

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet as pq
import xxhash

from eagle3_pipeline.engine.backend import Backend, CaptureTarget
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import CaptureError, DiskSpaceError, Eagle3Error, EngineError, StoreError
from eagle3_pipeline.store.atomic import storage_error
from eagle3_pipeline.store.fingerprint import ids_checksum
from eagle3_pipeline.store.records import RecordReader, intact_records
from eagle3_pipeline.store.shards import ShardRecord

PROGRESS_EVERY_S = 2.0
_RECORD_POLL_S = 0.02
_WRITE_STALL_S = 120.0
_STALL_CHECK_S = 5.0
# Of a sequence whose states made room for others.
_MOST_PREFILLS = 3
_ONE_TOKEN = {"temperature": 0.0, "max_tokens": 1}
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class GenerateJob:
    """Request of a whole chunk.

    Attributes:
        prompts: Parquet file of sequence_id, input_ids.
        journal: JSON lines of finished answers; the rows that it holds are not generated again.
        sampling: temperature, top_p, top_k, max_tokens, stop_token_ids, logprobs.
        capture_folder: shard folder; empty: no capture.
        include_output: capture sampled tokens too.
        batch_size: most requests in flight; 0: twice the engine's.
        urgent: served before the requests of other jobs.
    """

    prompts: str
    journal: str
    sampling: dict[str, Any]
    capture_folder: str = ""
    include_output: bool = False
    batch_size: int = 0
    urgent: bool = False


@dataclass
class _Arrival:
    """A sequence of so many rows, whose record is waited for; how often it was missed since."""

    rows: int
    event: asyncio.Event = field(default_factory=asyncio.Event)
    misses: int = 0


@dataclass
class _State:
    total: int
    reused: int = 0
    done: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    def counts(self) -> dict[str, Any]:
        elapsed = max(time.monotonic() - self.started, 1e-9)
        fields = {k: v for k, v in asdict(self).items() if k != "started"}
        return {**fields, "elapsed_s": round(elapsed, 3)}


def read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Finished answers by sequence id; the last of a sequence counts, torn and damaged lines do not.

    `prompt` is the checksum of the ids that were asked.
    """
    answers: dict[str, dict[str, Any]] = {}
    if path.exists():
        data = path.read_bytes()
        for line in data[: data.rfind(b"\n") + 1].splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                row = json.loads(line)
                if row.pop("checksum") == _checksum(row):
                    answers[row["sequence_id"]] = row
    return answers


def journal_line(row: dict[str, Any]) -> str:
    """A line of a journal: an answer, and the xxh3-64 of it as JSON."""
    return json.dumps({**row, "checksum": _checksum(row)}) + "\n"


def _checksum(row: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(row).encode())


def _open_journal(path: Path) -> IO[str]:
    """Opens a journal for appending, behind its last complete line."""
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


async def run_job(job: GenerateJob, backend: Backend, spec: EngineSpec, job_id: str, send: Send) -> dict[str, Any]:
    """Runs a job to its end.

    Returns:
        Counts: total, reused, done, prompt_tokens, new_tokens, elapsed_s.

    Raises:
        CaptureError: a row's states were not written.
        EngineError: the engine refused or lost a request.
    """
    if job.capture_folder and not spec.layer_ids:
        raise EngineError("this engine does not capture hidden states; its spec names no layers")
    prompts = pq.read_table(job.prompts, columns=["sequence_id", "input_ids"]).to_pylist()
    _refuse_long(prompts, job, spec)
    with contextlib.closing(_Runner(job, backend, spec, job_id)) as runner:
        await runner.find_captured()
        pending = [p for p in prompts if not runner.is_done(p)]
        state = _State(total=len(prompts), reused=len(prompts) - len(pending))
        ticker = asyncio.create_task(_tick(state, send))
        try:
            await runner.run(pending, state)
        finally:
            ticker.cancel()
    return state.counts()


def _refuse_long(prompts: list[dict[str, Any]], job: GenerateJob, spec: EngineSpec) -> None:
    for prompt in prompts:
        needed = len(prompt["input_ids"]) + job.sampling["max_tokens"]
        if needed > spec.max_model_len:
            raise EngineError(
                f"sequence {prompt['sequence_id']} needs {needed} tokens, the engine's max_model_len is "
                f"{spec.max_model_len}; lower generation.max_sequence_tokens"
            )


async def _tick(state: _State, send: Send) -> None:
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        await send({"event": "progress", **state.counts()})


def _first(errors: BaseExceptionGroup) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


class _Runner:
    """Requests of one job, with the records of their captured rows."""

    def __init__(self, job: GenerateJob, backend: Backend, spec: EngineSpec, job_id: str) -> None:
        self._job = job
        self._backend = backend
        self._job_id = job_id
        self._folder = Path(job.capture_folder) if job.capture_folder else None
        self._answers = read_journal(Path(job.journal))
        self._records: dict[str, ShardRecord] = {}
        self._arrivals: dict[str, _Arrival] = {}
        self._reader = RecordReader(self._folder) if self._folder else None
        self._geometry = spec.geometry
        self._journal = _open_journal(Path(job.journal))
        self._limit = asyncio.Semaphore(job.batch_size or 2 * spec.max_num_seqs)

    async def find_captured(self) -> None:
        """Reads what earlier passes left; minutes of it, for a large chunk, in which the host has other clients."""
        if self._folder and self._reader:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._records = await asyncio.to_thread(intact_records, self._folder, self._geometry)
            self._reader.read()

    def is_done(self, prompt: dict[str, Any]) -> bool:
        """Whether an earlier life of this job finished this very prompt, its captured rows included.

        A sequence id says from where a prompt comes, not what it is: a template that reads the clock, or another
        release of the tokenizer, makes another one of the same conversation.
        """
        answer = self._answers.get(prompt["sequence_id"])
        if answer is None or answer.get("prompt") != ids_checksum(prompt["input_ids"]):
            return False
        if not self._folder:
            return True
        record = self._records.get(prompt["sequence_id"])
        return record is not None and record.ids == ids_checksum(self._captured_ids(prompt, answer["token_ids"]))

    def _captured_ids(self, prompt: dict[str, Any], token_ids: list[int]) -> list[int]:
        """The tokens whose states are captured."""
        return [*prompt["input_ids"], *token_ids[:-1]] if self._job.include_output else prompt["input_ids"]

    async def run(self, prompts: list[dict[str, Any]], state: _State) -> None:
        for prompt in prompts:
            self._records.pop(prompt["sequence_id"], None)
        try:
            async with asyncio.TaskGroup() as outer:
                watching = outer.create_task(self._watch_records(self._reader)) if self._reader else None
                async with asyncio.TaskGroup() as group:
                    for prompt in prompts:
                        await self._limit.acquire()
                        group.create_task(self._one(prompt, state))
                if watching:
                    watching.cancel()
        except* Exception as errors:
            # The first of ours says most; else whatever the engine raised first.
            ours, others = errors.split(Eagle3Error)
            raise _first(ours or others or errors) from None

    async def _one(self, prompt: dict[str, Any], state: _State) -> None:
        try:
            identity, ids = prompt["sequence_id"], prompt["input_ids"]
            target = CaptureTarget(self._folder, identity, self._job.include_output) if self._folder else None
            name, job = f"{self._job_id}-{identity}", self._job
            answer = await self._backend.generate(name, ids, job.sampling, target, job.urgent)
            if target:
                await self._captured(name, target, self._captured_ids(prompt, answer.token_ids))
            found = {k: v for k, v in vars(answer).items() if v is not None}
            row = {"sequence_id": identity, "prompt": ids_checksum(ids), **found}
            self._note(row)
            state.done += 1
            state.prompt_tokens += len(ids)
            state.new_tokens += len(answer.token_ids)
        finally:
            self._limit.release()

    def _note(self, row: dict[str, Any]) -> None:
        try:
            self._journal.write(journal_line(row))
            self._journal.flush()
        except OSError as error:
            raise storage_error(error, Path(self._job.journal)) from error

    async def _captured(self, name: str, target: CaptureTarget, ids: list[int]) -> None:
        """Waits for the states of these tokens.

        A step is scheduled before the one that runs says which sequences end with it. Of one that had to make room for
        others in between none are left: its tokens are prefilled.
        """
        record = await self._written(target.sequence_id, len(ids))
        for attempt in range(_MOST_PREFILLS):
            if record.num_tokens or record.error:
                break
            del self._records[target.sequence_id]
            prefill = CaptureTarget(target.folder, target.sequence_id, include_output=False)
            await self._backend.generate(f"{name}-again-{attempt}", ids, _ONE_TOKEN, prefill, self._job.urgent)
            record = await self._written(target.sequence_id, len(ids))
        if record.error:
            kind = DiskSpaceError if "Errno 28" in record.error or "Errno 122" in record.error else CaptureError
            what = f"cannot write the hidden states of sequence {target.sequence_id} to {target.folder}"
            raise kind(f"{what}: {record.error}")
        if record.num_tokens != len(ids):
            raise CaptureError(
                f"sequence {target.sequence_id}: {record.num_tokens} rows of hidden states were captured, "
                f"expected {len(ids)}"
            )
        if record.ids != ids_checksum(ids):
            raise CaptureError(
                f"sequence {target.sequence_id}: hidden states of other tokens than its own were captured"
            )

    async def _written(self, identity: str, expected_rows: int) -> ShardRecord:
        """Waits for the writer's record: vLLM answers before its writer threads are done."""
        if identity not in self._records:
            await self._arrivals.setdefault(identity, _Arrival(expected_rows)).event.wait()
        return self._records[identity]

    async def _watch_records(self, reader: RecordReader) -> None:
        """Hands out records as they come; an error of it ends the job."""
        next_check = time.monotonic() + _STALL_CHECK_S
        try:
            while True:
                records = {record.sequence_id: record for record in reader.read()}
                self._records |= records
                for identity in records:
                    if arrival := self._arrivals.pop(identity, None):
                        arrival.event.set()
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + _STALL_CHECK_S
                    self._check_stall()
                await asyncio.sleep(_RECORD_POLL_S)
        except OSError as error:
            raise StoreError(f"cannot follow the captured states in {self._folder}: {error}") from error

    def _check_stall(self) -> None:
        """Fails the job for what waits too long: on a full disk the writer cannot even leave a record of its error.

        What counts is how often a sequence was missed, not the clock: a stopped process has not waited.
        """
        for arrival in self._arrivals.values():
            arrival.misses += 1
        late = {name: arrival for name, arrival in self._arrivals.items() if arrival.misses > 1}
        if not late:
            return
        free = shutil.disk_usage(str(self._folder)).free
        for identity, arrival in late.items():
            waited_s = (arrival.misses - 1) * _STALL_CHECK_S
            what = f"hidden states of sequence {identity} were not written to {self._folder} within {waited_s:.0f} s"
            if free < arrival.rows * self._geometry.row_bytes:
                raise DiskSpaceError(f"{what}: {free:,} bytes are free on its volume; free some and run again")
            if waited_s >= _WRITE_STALL_S:
                raise CaptureError(f"{what}; {free:,} bytes are free on its volume")

    def close(self) -> None:
        if self._reader:
            self._reader.close()
        # What could not be written was told when it was; closing tries once more.
        with contextlib.suppress(OSError):
            self._journal.close()
