"""Loading: what is joined, how it is aligned, and which inputs are refused."""

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from transformers import LlamaForCausalLM

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.store.fingerprint import token_lists_id
from eagle3_pipeline.training.dataset import (
    HiddenStateDataset,
    PackedBatches,
    PackedCollate,
    SequenceTable,
    conversation_roots,
    load_sequences,
    make_loader,
)
from eagle3_pipeline.training.job import ChunkInput
from eagle3_pipeline.training.progress import supervised_mask
from eagle3_pipeline_tests.training.conftest import AUX_LAYER_IDS, HIDDEN, Row, capture, write_chunk

Verifier = tuple[Path, LlamaForCausalLM]


def load(chunk: dict[str, str], hidden: int = HIDDEN) -> SequenceTable:
    return load_sequences(
        [ChunkInput(chunk["chunk"], Path(chunk["sequences"]), Path(chunk["hidden_states"]))],
        len(AUX_LAYER_IDS) + 1,
        hidden,
    )


def test_positions_pair_a_token_with_the_state_before_it_and_the_target_after_it(
    tmp_path: Path, verifier: Verifier, rows: list[Row]
) -> None:
    table = load(write_chunk(tmp_path / "c", verifier[1], rows[:3]))
    assert len(table.shards) > 1
    dataset = HiddenStateDataset(table, [0, 1, 2])
    batch = PackedCollate(None)([dataset[i] for i in range(3)])
    at = 0
    for row in rows[:3]:
        states = capture(verifier[1], row.input_ids)
        n = len(row.input_ids)
        for k in range(1, n - 1):
            assert batch["input_ids"][0, at] == row.input_ids[k]
            assert torch.equal(batch["hidden_states"][0, at], states[k - 1, :3].flatten())
            assert torch.equal(batch["verifier_last_hidden_states"][0, at], states[k, 3])
            assert bool(batch["loss_mask"][0, at]) is row.loss_mask[k + 1]
            assert batch["position_ids"][0, at] == k
            at += 1
        # Every trained token of a chat sequence is the target of one position, the first and the last
        # included.
        assert int(table.mask(rows.index(row))[1:].sum()) == sum(row.loss_mask)
    assert at == batch["input_ids"].shape[1]
    assert batch["document_ids"][0].bincount().tolist() == [len(r.input_ids) - 2 for r in rows[:3]]


def test_padding_is_no_document(chunks: list[dict[str, str]]) -> None:
    dataset = HiddenStateDataset(load(chunks[0]), [0])
    batch = PackedCollate(64)([dataset[0]])
    length = int(dataset.num_positions[0])
    assert batch["document_ids"].shape == (1, 64)
    assert (batch["document_ids"][0, length:] == -1).all()
    assert not batch["loss_mask"][0, length:].any()


def test_packing_is_that_of_speculators(chunks: list[dict[str, str]]) -> None:
    dataset = HiddenStateDataset(load(chunks[0]), [0, 1, 2])
    samples = [dataset[i] for i in range(3)]
    flat = [{**sample, "hidden_states": sample["hidden_states"].flatten(1)} for sample in samples]
    expected = CollateFn(128, HIDDEN, 3, torch.bfloat16, shift_batch)(flat)
    found = PackedCollate(128)(samples)
    assert found.keys() == {name for name, value in expected.items() if torch.is_tensor(value)}
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


def test_missing_sequence_is_an_error(tmp_path: Path, verifier: Verifier, rows: list[Row]) -> None:
    chunk = write_chunk(tmp_path / "000007", verifier[1], rows[:3], skip={"s1"})
    with pytest.raises(TrainingError, match="chunk 000007, sequence s1 has no hidden states"):
        load(chunk)


def test_a_chunk_that_was_captured_again_is_read_as_any_other(
    tmp_path: Path, verifier: Verifier, rows: list[Row]
) -> None:
    """Killed between sealing and publishing, it is captured into further shards, and the first ones are removed."""
    once, again = (
        HiddenStateDataset(load(write_chunk(tmp_path / f"00000{lives}", verifier[1], rows[:6], lives=lives)), range(6))
        for lives in (1, 2)
    )
    assert not (tmp_path / "000002" / "states" / "shard-00000.safetensors").exists()
    for one, other in zip(map(once.__getitem__, range(6)), map(again.__getitem__, range(6)), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


def test_rows_of_other_tokens_are_an_error(tmp_path: Path, verifier: Verifier, rows: list[Row]) -> None:
    chunk = write_chunk(tmp_path / "000007", verifier[1], rows[:3])
    table = pq.read_table(chunk["sequences"])
    ids = table["input_ids"].to_pylist()
    old, ids[2][4] = ids[2][4], (ids[2][4] + 1) % 128
    pq.write_table(table.set_column(3, table.schema.field(3), pa.array(ids, pa.list_(pa.int32()))), chunk["sequences"])
    expected = rf"chunk 000007, sequence s2: .*position 4 \(expected {ids[2][4]}, found {old}\)"
    with pytest.raises(TrainingError, match=expected):
        load(chunk)


def test_too_few_rows_are_an_error(tmp_path: Path, verifier: Verifier, rows: list[Row]) -> None:
    chunk = write_chunk(tmp_path / "000007", verifier[1], rows[:2])
    longer = Row("s0", "c0", [*rows[0].input_ids, 5], [*rows[0].loss_mask, True])
    write_chunk(tmp_path / "longer", verifier[1], [longer])
    chunk["sequences"] = str(tmp_path / "longer" / "sequences.parquet")
    n = len(rows[0].input_ids)
    with pytest.raises(TrainingError, match=rf"sequence s0 has {n - 1} rows .* expected {n}"):
        load(chunk)


def test_last_token_may_differ_only_in_the_sequence(tmp_path: Path, verifier: Verifier, rows: list[Row]) -> None:
    """The last token has no row: it is checked by no shard, and a one-token answer is its own target."""
    row = Row("s", "c", rows[0].input_ids[:8], [False] * 7 + [True])
    table = load(write_chunk(tmp_path / "c", verifier[1], [row]))
    assert table.mask(0).tolist() == [False] * 6 + [True]
    assert table.num_supervised().tolist() == [1]


def test_states_of_another_verifier_are_an_error(chunks: list[dict[str, str]]) -> None:
    with pytest.raises(TrainingError, match=r"hidden_states is BF16 \[\d+, 4, 32\], expected BF16 \[\d+, 4, 64\]"):
        load(chunks[0], hidden=64)


def test_order_is_a_function_of_seed_and_epoch_and_resumes(chunks: list[dict[str, str]]) -> None:
    positions = load(chunks[0]).num_positions
    first, second = (PackedBatches(positions, 64, 5) for _ in range(2))
    second.of_epoch(9)
    assert first.of_epoch(2) == second.of_epoch(2)
    assert first.of_epoch(2) != first.of_epoch(3)
    assert sorted(i for batch in first.of_epoch(2) for i in batch) == list(range(len(positions)))
    assert all(positions[batch].sum() <= 64 for batch in first.of_epoch(2))
    first.select([first.of_epoch(2)[number] for number in (2, 1)])
    assert list(first) == [first.of_epoch(2)[2], first.of_epoch(2)[1]]


def test_open_files_do_not_travel_to_workers(chunks: list[dict[str, str]]) -> None:
    dataset = HiddenStateDataset(load(chunks[0]), [3])
    before = dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    assert all(torch.equal(copy[0][name], value) for name, value in before.items())


@pytest.mark.slow
def test_worker_processes_give_the_same_batches(chunks: list[dict[str, str]]) -> None:
    dataset = HiddenStateDataset(load(chunks[0]), list(range(10)))
    given = []
    for num_workers in (0, 1):
        batches = PackedBatches(dataset.num_positions, 64, 0)
        batches.select(batches.of_epoch(1))
        given.append(list(make_loader(dataset, batches, PackedCollate(None), num_workers, False)))
    for one, other in zip(*given, strict=True):
        assert all(np.array_equal(one[name].float(), other[name].float()) for name in one)


@pytest.mark.parametrize("ttt_steps", [1, 3, 7])
def test_targets_counted_in_the_table_are_those_of_the_batches(chunks: list[dict[str, str]], ttt_steps: int) -> None:
    """Ranks weigh their batches by the counts of all, and do not tell each other."""
    dataset = HiddenStateDataset(load(chunks[0]), list(range(2, 10)))
    batches = PackedBatches(dataset.num_positions, 64, 0)
    batches.select(batches.of_epoch(1))
    supervised = dataset.table.num_supervised(max(1, ttt_steps))[dataset.indices]
    packed = list(make_loader(dataset, batches, PackedCollate(None), 0, False))
    found = [int(supervised_mask(batch, ttt_steps).sum()) for batch in packed]
    assert found == [int(supervised[numbers].sum()) for numbers in batches.of_epoch(1)]
    assert sum(found) > 0
    positions = [int((batch["document_ids"] >= 0).sum()) for batch in packed]
    assert positions == [int(dataset.num_positions[numbers].sum()) for numbers in batches.of_epoch(1)]


def test_what_a_conversation_begins_with_is_read_from_files_of_earlier_releases() -> None:
    """They have no column for it: it is the prompt of the earliest sequence."""
    rows = {
        "conversation_id": ["a", "b", "a"],
        "turn": [2, 0, 0],
        "input_ids": [[1, 2, 3, 4, 5], [1, 2, 9], [1, 2, 3]],
        "num_prompt_tokens": [4, 2, 2],
    }
    found = conversation_roots(pa.table(rows))
    assert found == {"a": token_lists_id([[1, 2]]), "b": token_lists_id([[1, 2]])}
    assert conversation_roots(pa.table(rows | {"root": ["r", "s", "r"]})) == {"a": "r", "b": "s"}
    assert conversation_roots(pa.table({"conversation_id": ["a"]})) == {}
