"""Decisions of the connector and the engine's arguments, without an engine."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnectorMetadata,
)

from eagle3_pipeline.engine import connector
from eagle3_pipeline.engine.connector import ShardConnector, _Ended
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.engine.vllm_backend import engine_arguments, set_environment
from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.fingerprint import ids_checksum
from eagle3_pipeline.store.records import intact_records, read_records
from eagle3_pipeline.store.shards import BLOCK_BYTES, HEADER_BYTES, Geometry, ShardRecord

GEOMETRY = Geometry((1, 2, 3), 8)
BLOCK = 4


def _connector(rank: int, pending: list[_Ended]) -> ShardConnector:
    """As vLLM sets it up on a CPU; every value of its cache is another one."""
    made = object.__new__(ShardConnector)
    made._is_tp_rank_zero, made._req_copy_events = rank == 0, {}
    made._request_filenames, made._pending_saves, made._hs_group_idx, made._cache_kv_group_id = {}, {}, 0, 0
    made._connector_metadata = ExampleHiddenStatesConnectorMetadata(pending_saves=pending)
    shape = (10, len(GEOMETRY.layer_ids), BLOCK, GEOMETRY.hidden_size)
    made._kv_cache = torch.arange(10 * 3 * BLOCK * 8).reshape(shape).to(torch.bfloat16)
    made._block_size, made._geometry, made._max_shard_bytes = BLOCK, GEOMETRY, 2**20
    made._appenders, made._appenders_lock = {}, threading.Lock()
    made._bytes_in_flight, made._freed = 0, threading.Condition()
    made._executor = ThreadPoolExecutor(2)
    return made


def _save(path: Path, num_rows: int, blocks: list[int]) -> _Ended:
    return _Ended(path.name, str(path.parent), path.name, num_rows, blocks, ids_checksum(range(num_rows)))


def _end(
    made: ShardConnector, path: str, num_prompt: int, num_sampled: int, blocks: list[int], **parameters: bool
) -> Any:
    """What vLLM's scheduler is told of a request; an empty path: it was never scheduled."""
    if path:
        made._request_filenames["r"] = path
    request = SimpleNamespace(
        request_id="r",
        num_prompt_tokens=num_prompt,
        num_tokens=num_prompt + num_sampled,
        all_token_ids=list(range(num_prompt + num_sampled)),
        kv_transfer_params=parameters or None,
    )
    return made.request_finished_all_groups(request, (blocks,))


@pytest.mark.parametrize("group_bytes", [1, 10 * GEOMETRY.row_bytes, 2**20])
def test_requests_of_one_step_are_written_together_each_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_bytes: int
) -> None:
    monkeypatch.setattr(connector, "_GROUP_BYTES", group_bytes)
    one, other = tmp_path / "one", tmp_path / "other"
    places = {one / "a": (5, [3, 1]), one / "b": (4, [0]), other / "c": (7, [9, 2]), one / "d": (1, [5])}
    made = _connector(0, [_save(path, n, blocks) for path, (n, blocks) in places.items()])
    sent, _ = made.get_finished({path.name for path in places})
    made._executor.shutdown()
    assert sent == {"a", "b", "c", "d"} and made._bytes_in_flight == 0
    found = {folder: intact_records(folder, GEOMETRY) for folder in (one, other)}
    assert (set(found[one]), set(found[other])) == ({"a", "b", "d"}, {"c"})
    for path, (num_tokens, blocks) in places.items():
        record = found[path.parent][path.name]
        expected = torch.stack([made._kv_cache[blocks[t // BLOCK], :, t % BLOCK] for t in range(num_tokens)])
        data = (path.parent / "shard-00000.safetensors").read_bytes()
        start = HEADER_BYTES + record.row_start * GEOMETRY.row_bytes
        assert data[start : start + expected.nbytes] == expected.view(torch.int16).numpy().tobytes(), path.name
        assert record.ids == ids_checksum(range(num_tokens))


def test_what_goes_to_a_folder_is_written_at_once_and_begins_at_a_block_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, list[str], int]] = []

    class Appender(ShardAppender):
        def append_all(
            self, sequence_ids: Sequence[str], lengths: Sequence[int], data: memoryview, ids: Sequence[str] = ()
        ) -> list[ShardRecord]:
            address = np.frombuffer(data.cast("B"), dtype=np.uint8).ctypes.data
            written.append((self._folder.name, list(sequence_ids), address))
            return super().append_all(sequence_ids, lengths, data, ids)

    monkeypatch.setattr(connector, "ShardAppender", Appender)
    names = ["two/a", "one/b", "three/c", "one/d", "two/e", "three/f"]
    made = _connector(0, [_save(tmp_path / name, 5, [number, number + 1]) for number, name in enumerate(names)])
    made.get_finished({name[-1] for name in names})
    made._executor.shutdown()
    expected = [("one", ["b", "d"]), ("three", ["c", "f"]), ("two", ["a", "e"])]
    assert [(folder, own) for folder, own, _ in written] == expected
    # Page-locked memory begins at a page; this one anywhere.
    assert [(address - written[0][2]) % BLOCK_BYTES for _, _, address in written] == [0, 0, 0]
    assert made._bytes_in_flight == 0


def test_a_group_fits_the_memory_that_was_pinned_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what fills a folder's last block, too: PyTorch would pin twice as much for a byte more."""
    monkeypatch.setattr(connector, "_GROUP_BYTES", 2 * GEOMETRY.rows_of_blocks * GEOMETRY.row_bytes)
    rows: list[int] = []
    made = _connector(0, [_save(tmp_path / str(folder) / "s", 5, [folder, folder + 1]) for folder in range(5)])
    made._reserve = lambda num_bytes: rows.append(num_bytes // GEOMETRY.row_bytes)  # type: ignore[method-assign]
    made.get_finished(set())
    made._executor.shutdown()
    whole = GEOMETRY.rows_of_blocks
    assert rows == [whole + 5, whole + 5, 5]


@pytest.mark.parametrize("group_bytes", [1, 2**20])
def test_a_request_that_was_cut_off_shifts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_bytes: int
) -> None:
    """An aborted request has the blocks that were computed so far."""
    monkeypatch.setattr(connector, "_GROUP_BYTES", group_bytes)
    pending = []
    for name, num_tokens, blocks in (("cut", 9, [4]), ("none", 5, []), ("whole", 3, [6])):
        scheduler = _connector(0, [])
        assert _end(scheduler, str(tmp_path / name), num_tokens, 1, blocks) == (True, None)
        pending += scheduler._pending_saves.values()
    made = _connector(0, pending)
    made.get_finished({"cut", "none", "whole"})
    made._executor.shutdown()
    records = {record.sequence_id: record for record in read_records(tmp_path)}
    assert {name: record.num_tokens for name, record in records.items()} == {"cut": BLOCK, "none": 0, "whole": 3}
    start = HEADER_BYTES + records["whole"].row_start * GEOMETRY.row_bytes
    expected = made._kv_cache[6, :, :3].transpose(0, 1).contiguous().view(torch.int16).numpy().tobytes()
    assert (tmp_path / "shard-00000.safetensors").read_bytes()[start : start + len(expected)] == expected


def test_a_step_is_taken_over_once(tmp_path: Path) -> None:
    made = _connector(0, [_save(tmp_path / "a", 3, [1])])
    assert made.get_finished({"a"})[0] == {"a"}
    assert made.get_finished(set())[0] is None
    made._executor.shutdown()
    assert len(read_records(tmp_path)) == 1


def test_copies_wait_for_the_steps_before_and_not_for_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the current step they would hold up its sampled tokens, for which the engine waits."""
    queued: list[str] = []

    class Event:
        def record(self) -> None:
            self.behind = list(queued)

    class Waits(Exception):
        """Ends the copy, which needs a GPU from here on."""

    def wait_event(event: Event) -> None:
        raise Waits(*event.behind)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    made = _connector(0, [])
    made._kv_cache = SimpleNamespace(device=SimpleNamespace(type="cuda"))  # type: ignore[assignment]
    made._get_copy_stream = lambda: SimpleNamespace(wait_event=wait_event)  # type: ignore[method-assign]
    for step in ("first", "second"):
        pending = [_save(tmp_path / step, 3, [1])]
        made.bind_connector_metadata(ExampleHiddenStatesConnectorMetadata(pending_saves=pending))
        queued.append(step)
        with pytest.raises(Waits) as waits:
            made.get_finished({step})
        assert list(waits.value.args) == queued[:-1]


@pytest.mark.parametrize(
    ("parameters", "num_rows"), [({}, 5), ({"include_output_tokens": False}, 5), ({"include_output_tokens": True}, 7)]
)
def test_of_the_last_sampled_token_there_is_no_state(parameters: dict[str, bool], num_rows: int) -> None:
    made = _connector(0, [])
    assert _end(made, "/folder/s", 5, 3, [8, 9], **parameters) == (True, None)
    assert made._pending_saves == {"r": _Ended("r", "/folder", "s", num_rows, [8, 9], ids_checksum(range(num_rows)))}


@pytest.mark.parametrize("path", ["", "r.safetensors"])
def test_blocks_of_a_request_that_is_not_captured_are_free_when_it_ends(path: str) -> None:
    """With a request that was aborted before it was scheduled, vLLM 0.24's connector ends the engine."""
    made = _connector(0, [])
    assert _end(made, path, 5, 3, [8, 9]) == (False, None)
    assert not made._pending_saves
    assert made.get_finished({"r"}) == (None, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_rank_that_copies_reports_a_request(rank: int, tmp_path: Path) -> None:
    """As many reports of a request as the engine waits for: one, of the first rank."""
    made = _connector(rank, [_save(tmp_path / "r", 3, [1])])
    assert made.get_finished({"r"}) == ({"r"} if rank == 0 else None, None)
    assert made.get_finished_count() == 1


def test_a_cache_of_a_given_size_is_asked_for_on_gpus_only() -> None:
    spec = EngineSpec("model", "id", "bfloat16", False, 64, num_gpus=1, gpu_kvcache_gib=1.5)
    assert engine_arguments(spec)["kv_cache_memory_bytes"] == 1.5 * 2**30
    assert "kv_cache_memory_bytes" not in engine_arguments(replace(spec, gpu_kvcache_gib=None))
    assert "kv_cache_memory_bytes" not in engine_arguments(replace(spec, num_gpus=0))


@pytest.mark.parametrize(("layers", "expected"), [((), None), ((1, 2, 3), "0")])
def test_capture_runs_on_the_runner_that_was_tested(
    monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...], expected: str | None
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    set_environment(EngineSpec("model", "id", "bfloat16", False, 64, num_gpus=1, layer_ids=layers, hidden_size=8))
    assert environment.get("VLLM_USE_V2_MODEL_RUNNER") == expected


@pytest.mark.parametrize(("cores", "expected"), [(2, "0"), (64, None)])
def test_few_cores_all_compute(monkeypatch: pytest.MonkeyPatch, cores: int, expected: str | None) -> None:
    """On two cores vLLM would keep one for its scheduler, and generate with the other."""
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    set_environment(EngineSpec("model", "id", "bfloat16", False, 64))
    assert environment.get("VLLM_CPU_NUM_OF_RESERVED_CPU") == expected
    environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    set_environment(EngineSpec("model", "id", "bfloat16", False, 64))
    assert environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"
