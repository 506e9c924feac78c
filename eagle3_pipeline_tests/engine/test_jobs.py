"""Jobs of one engine: answers, captured states, journals, failures of the writer."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import numpy as np
import pytest

from eagle3_pipeline.engine import jobs
from eagle3_pipeline.engine.client import EngineClient
from eagle3_pipeline.engine.jobs import journal_line, read_journal
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.errors import CaptureError, DiskSpaceError, EngineError
from eagle3_pipeline.store.fingerprint import ids_checksum
from eagle3_pipeline.store.records import intact_records, read_records, written_records
from eagle3_pipeline.store.shards import Geometry, map_states, seal_shards, shard_name
from eagle3_pipeline_tests.engine.conftest import (
    HIDDEN,
    LAYER_IDS,
    PROMPTS,
    JobMaker,
    capturing_spec,
    engine_spec,
    journal_rows,
)
from eagle3_pipeline_tests.fake_engine import FakeBackend, answer_tokens, state_bits

GEOMETRY = Geometry(LAYER_IDS, HIDDEN)


@pytest.fixture
def client(manager: EngineManager) -> Iterator[EngineClient]:
    with manager.acquire(capturing_spec(), print) as client:
        yield client


def test_the_fake_engine_answers_as_worked_out_by_hand() -> None:
    # 31*2 + 7*1 + 11 = 80; 31*80 + 7*2 + 11 = 2505 -> 5; 31*5 + 7*80 + 11 = 726 -> 26.
    assert answer_tokens([1, 2], 3) == [80, 5, 26]
    assert answer_tokens([1, 2], 3, stop=[5]) == [80, 5]
    # bf16 of 7*1 + 13*2 + 3*1 + 1 = 37 = 1.15625 * 2**5: exponent 127+5, mantissa 0010100.
    assert state_bits([1], [2], 2)[0, 0, 1] == (132 << 7) | 0b0010100


def test_answers_go_to_the_journal_and_the_result_counts_them(client: EngineClient, make_job: JobMaker) -> None:
    prompts = {"a": [1, 2], "b": [7]}
    job = make_job(prompts=prompts, sampling={"max_tokens": 3, "stop_token_ids": [5]})
    result = client.generate(job)
    counts = {k: result[k] for k in ("total", "reused", "done", "prompt_tokens", "new_tokens")}
    # b: 31*7 + 11 = 228 -> 28; 31*28 + 7*7 + 11 = 928 -> 28; 31*28 + 7*28 + 11 = 1075 -> 75.
    assert counts == {"total": 2, "reused": 0, "done": 2, "prompt_tokens": 3, "new_tokens": 5}
    assert len(journal_rows(job)) == 2
    assert read_journal(Path(job.journal)) == {
        "a": {"sequence_id": "a", "prompt": ids_checksum([1, 2]), "token_ids": [80, 5], "finish_reason": "stop"},
        "b": {"sequence_id": "b", "prompt": ids_checksum([7]), "token_ids": [28, 28, 75], "finish_reason": "length"},
    }


def test_captured_states_are_those_of_every_token_but_the_last(client: EngineClient, make_job: JobMaker) -> None:
    job = make_job(capture=True)
    client.generate(job)
    folder = Path(job.capture_folder)
    records = intact_records(folder, GEOMETRY)
    answers = read_journal(Path(job.journal))
    tokens = {k: np.array([*ids, *answers[k]["token_ids"]][:-1]) for k, ids in PROMPTS.items()}
    assert {k: r.num_tokens for k, r in records.items()} == {k: len(v) for k, v in tokens.items()}
    seal_shards(folder, records.values(), tokens, GEOMETRY, {})
    states, ids = map_states(folder / shard_name(0))
    for name, record in records.items():
        part = slice(record.row_start, record.row_start + record.num_tokens)
        assert np.array_equal(states[part], state_bits(tokens[name], LAYER_IDS, HIDDEN))
        assert np.array_equal(ids[part], tokens[name])


def test_a_prefill_captures_the_prompt_only(client: EngineClient, make_job: JobMaker) -> None:
    job = make_job(capture=True, include_output=False, sampling={"max_tokens": 1})
    client.generate(job)
    records = intact_records(Path(job.capture_folder), GEOMETRY)
    assert {k: r.num_tokens for k, r in records.items()} == {k: len(v) for k, v in PROMPTS.items()}


def test_a_finished_job_is_not_generated_again(client: EngineClient, make_job: JobMaker) -> None:
    job = make_job(capture=True)
    client.generate(job)
    before = Path(job.journal).read_bytes(), len(read_records(Path(job.capture_folder)))
    result = client.generate(job)
    assert (result["reused"], result["done"]) == (6, 0)
    assert (Path(job.journal).read_bytes(), len(read_records(Path(job.capture_folder)))) == before


def test_only_rows_without_an_answer_are_generated(client: EngineClient, make_job: JobMaker) -> None:
    job = make_job()
    kept = {"sequence_id": "s3", "prompt": ids_checksum(PROMPTS["s3"]), "token_ids": [1], "finish_reason": "stop"}
    Path(job.journal).write_text(journal_line(kept))
    result = client.generate(job)
    assert (result["reused"], result["done"]) == (1, 5)
    assert read_journal(Path(job.journal))["s3"] == kept, "the earlier answer stays, whatever it was"


@pytest.mark.parametrize("asked", [None, [9, 9], PROMPTS["s2"]], ids=["an earlier release", "other ids", "another's"])
def test_the_answer_to_another_prompt_of_the_same_name_is_not_reused(
    client: EngineClient, make_job: JobMaker, asked: list[int] | None
) -> None:
    job = make_job()
    prompt = {} if asked is None else {"prompt": ids_checksum(asked)}
    Path(job.journal).write_text(
        journal_line({"sequence_id": "s3", **prompt, "token_ids": [1], "finish_reason": "stop"})
    )
    result = client.generate(job)
    assert (result["reused"], result["done"]) == (0, 6)
    row = read_journal(Path(job.journal))["s3"]
    assert row["prompt"] == ids_checksum(PROMPTS["s3"])
    assert row["token_ids"] == answer_tokens(PROMPTS["s3"], job.sampling["max_tokens"])


def test_states_of_other_tokens_of_the_same_length_are_captured_again(client: EngineClient, make_job: JobMaker) -> None:
    """As left by a chat template that reads the clock: same sequences, same lengths, other ids."""
    job = make_job(capture=True, prompts={name: [*ids[:-1], ids[-1] + 1] for name, ids in PROMPTS.items()})
    client.generate(job)
    again = make_job(capture=True)
    assert again.journal == job.journal
    result = client.generate(again)
    assert (result["reused"], result["done"]) == (0, 6)
    records = written_records(Path(job.capture_folder), GEOMETRY)
    answers = read_journal(Path(job.journal))
    for name, ids in PROMPTS.items():
        assert records[name].ids == ids_checksum([*ids, *answers[name]["token_ids"][:-1]])


def test_an_answer_whose_states_were_damaged_is_generated_again(client: EngineClient, make_job: JobMaker) -> None:
    job = make_job(capture=True)
    client.generate(job)
    folder = Path(job.capture_folder)
    damaged = intact_records(folder, GEOMETRY)["s2"]
    with (folder / shard_name(damaged.shard)).open("r+b") as file:
        file.seek(4096 + damaged.row_start * GEOMETRY.row_bytes)
        file.write(b"\xff\xff")
    result = client.generate(job)
    assert (result["reused"], result["done"]) == (5, 1)
    assert set(intact_records(folder, GEOMETRY)) == set(PROMPTS)


def test_the_host_answers_others_while_a_job_reads_what_earlier_passes_left(
    make_job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_ran = threading.Event()

    def read(*_: object) -> dict:
        assert others_ran.wait(10)
        return {}

    async def run() -> dict:
        job = jobs.run_job(make_job(prompts={}, capture=True), FakeBackend(), capturing_spec(), "job", AsyncMock())
        running = asyncio.create_task(job)
        await asyncio.sleep(0.1)
        others_ran.set()
        return await running

    monkeypatch.setattr(jobs, "intact_records", read)
    assert asyncio.run(run())["total"] == 0


def test_few_requests_are_in_flight_where_the_job_says_so(
    manager: EngineManager, make_job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "0.05")
    with manager.acquire(engine_spec(), print) as client:
        one_by_one = client.generate(make_job("slow", batch_size=1))["elapsed_s"]
    # Six answers of 0.05 s in a row cannot take less, whatever the machine's load.
    assert one_by_one >= 6 * 0.05


def test_a_sequence_beyond_the_engines_length_is_refused_and_the_engine_stays(
    client: EngineClient, make_job: JobMaker
) -> None:
    with pytest.raises(EngineError, match="sequence s2 needs 65 tokens, the engine's max_model_len is 64"):
        client.generate(make_job(sampling={"max_tokens": 61}))
    assert client.generate(make_job())["done"] == 6


def test_unreadable_prompts_are_named_and_the_engine_stays(client: EngineClient, make_job: JobMaker) -> None:
    with pytest.raises(EngineError, match="nowhere.parquet"):
        client.generate(replace(make_job(), prompts="nowhere.parquet"))
    assert client.generate(make_job())["done"] == 6


def test_an_engine_that_does_not_capture_refuses_to(manager: EngineManager, make_job: JobMaker) -> None:
    with manager.acquire(engine_spec(), print) as client, pytest.raises(EngineError, match="does not capture"):
        client.generate(make_job(capture=True))


def test_unknown_operations_are_answered_with_an_error(client: EngineClient) -> None:
    with pytest.raises(Exception, match="unknown operation 'dance'"):
        client.request("dance")
    assert client.request("info")["clients"] == 1


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        ("write_error:s4", CaptureError, r"cannot write the hidden states of sequence s4 to .*Input/output error"),
        ("disk_full:s4", DiskSpaceError, r"cannot write the hidden states of sequence s4 to .*No space left on device"),
        ("short_capture:s4", CaptureError, r"sequence s4: 6 rows of hidden states were captured, expected 7"),
        ("no_rows:s4", CaptureError, r"sequence s4: 0 rows of hidden states were captured, expected 7"),
        ("generate:s4", EngineError, r"request .*-s4 ended without an answer"),
    ],
)
def test_a_failed_sequence_is_named_and_the_others_survive(
    manager: EngineManager,
    make_job: JobMaker,
    monkeypatch: pytest.MonkeyPatch,
    failure: str,
    kind: type[Exception],
    message: str,
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", failure)
    job = make_job(capture=True, batch_size=1)
    # s4 has 3 prompt tokens and 5 sampled ones: 7 rows.
    assert len(PROMPTS["s4"]) == 3
    with manager.acquire(capturing_spec(), print) as client, pytest.raises(kind, match=message) as caught:
        client.generate(job)
    assert type(caught.value) is kind
    assert set(read_journal(Path(job.journal))) == {"s0", "s1", "s2", "s3"}
    # The next engine writes: what was done before the failure is reused.
    manager.stop_all(lambda _: None)
    monkeypatch.delenv("EAGLE3_FAKE_FAIL")
    with manager.acquire(capturing_spec(), print) as client:
        result = client.generate(job)
    assert (result["reused"], result["done"]) == (4, 2)
    assert set(intact_records(Path(job.capture_folder), GEOMETRY)) == set(PROMPTS)


@pytest.mark.parametrize("include_output", [True, False])
def test_a_sequence_that_made_room_for_others_when_it_ended_is_prefilled(
    manager: EngineManager, make_job: JobMaker, monkeypatch: pytest.MonkeyPatch, include_output: bool
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "preempted:s4")
    job = make_job(capture=True, include_output=include_output)
    with manager.acquire(capturing_spec(), print) as client:
        result = client.generate(job)
    assert (result["done"], result["prompt_tokens"]) == (6, sum(map(len, PROMPTS.values())))
    folder, answers = Path(job.capture_folder), read_journal(Path(job.journal))
    written = [record.num_tokens for record in read_records(folder) if record.sequence_id == "s4"]
    tokens = {
        name: [*ids, *answers[name]["token_ids"][:-1]][: None if include_output else len(ids)]
        for name, ids in PROMPTS.items()
    }
    assert written == [0, len(tokens["s4"])]
    records = intact_records(folder, GEOMETRY)
    seal_shards(folder, records.values(), {name: np.array(ids) for name, ids in tokens.items()}, GEOMETRY, {})
    states, _ = map_states(folder / shard_name(0))
    start = records["s4"].row_start
    assert np.array_equal(states[start : start + len(tokens["s4"])], state_bits(tokens["s4"], LAYER_IDS, HIDDEN))


def test_draft_steps_are_counted_since_the_start(manager: EngineManager, make_job: JobMaker) -> None:
    spec = engine_spec(draft_path="draft", num_speculative_tokens=2)
    with manager.acquire(spec, print) as client:
        before = client.request("counters")
        client.generate(make_job(prompts={"a": [1, 2]}, sampling={"max_tokens": 8}))
        after = client.request("counters")
    assert before["num_drafts"] == 0 and before["accepted_per_position"] == [0, 0]
    # One token from the prefill, then steps of 1+0, 1+1, 1+2, 1+0 tokens: four drafts.
    assert (after["num_drafts"], after["num_draft_tokens"], after["accepted_per_position"]) == (4, 8, [2, 1])


def test_a_torn_journal_line_is_not_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    rows = [{"sequence_id": "a", "token_ids": [1]}, {"sequence_id": "a", "token_ids": [2]}]
    path.write_text("".join(map(journal_line, rows)) + journal_line({"sequence_id": "b", "token_ids": [3]})[:-1])
    assert read_journal(path) == {"a": {"sequence_id": "a", "token_ids": [2]}}
    assert read_journal(tmp_path / "none") == {}


def test_a_job_after_a_torn_journal_line_does_not_continue_it(client: EngineClient, make_job: JobMaker) -> None:
    job = make_job()
    Path(job.journal).write_text('{"sequence_id": "s0", "tok')
    client.generate(job)
    assert set(read_journal(Path(job.journal))) == set(PROMPTS)


def test_a_full_disk_below_the_journal_is_told_as_such(
    client: EngineClient, make_job: JobMaker, small_volume: Path
) -> None:
    job = replace(make_job(), journal=str(small_volume / "journal.jsonl"))
    with (small_volume / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    with pytest.raises(DiskSpaceError, match="journal"):
        client.generate(job)
