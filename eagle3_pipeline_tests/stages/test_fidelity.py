"""Every kind of damage to captured states is refused, with its place."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from eagle3_pipeline.errors import CaptureError
from eagle3_pipeline.stages.fidelity import check_states
from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.shards import Geometry, ShardRecord, bf16_to_float32, read_index, seal_shards

GEOMETRY = Geometry((2, 5, 8), 16)
LENGTHS = {"s0": 6, "s1": 9, "s2": 3, "s3": 5}
NAN, ONE = 0x7FC0, 0x3F80


@dataclass
class Capture:
    """States as bf16 bits [n, A+1, H] and input ids [n], by sequence id; a test damages some before they are sealed."""

    folder: Path
    states: dict[str, np.ndarray]
    tokens: dict[str, np.ndarray]
    records_of: str = "this version"
    records: list[ShardRecord] = field(default_factory=list)

    def seal(self, tokens: dict[str, np.ndarray] | None = None, geometry: Geometry = GEOMETRY) -> pa.Table:
        """Writes two shards; `tokens` replaces the ids that are stored."""
        appender = ShardAppender(self.folder, geometry, 4096 + 16 * geometry.row_bytes)
        self.records = [appender.append(name, states.data) for name, states in self.states.items()]
        appender.close()
        return seal_shards(self.folder, self.records, {**self.tokens, **(tokens or {})}, geometry, {})

    def check(self, index: pa.Table, min_variance: float = 1e-8) -> dict[str, float]:
        records = {record.sequence_id: record for record in self.records} if self.records_of else None
        if records and self.records_of == "an earlier version":
            records = {name: replace(record, fault="", moments=[]) for name, record in records.items()}
        return check_states(self.folder, index, self.tokens, GEOMETRY, min_variance, "000007", records)


@pytest.fixture(params=["this version", "an earlier version", ""], ids=["records", "old records", "no records"])
def capture(tmp_path: Path, request: pytest.FixtureRequest) -> Capture:
    draw = np.random.default_rng(0)
    states = {
        name: (draw.normal(size=(n, 3, 16)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for name, n in LENGTHS.items()
    }
    tokens = {name: draw.integers(0, 100, n).astype(np.int32) for name, n in LENGTHS.items()}
    return Capture(tmp_path / "states", states, tokens, request.param)


def test_good_states_pass_with_the_variance_of_every_layer(capture: Capture) -> None:
    index = capture.seal()
    assert set(index["shard"].to_pylist()) == {0, 1}
    found = capture.check(index)
    everything = bf16_to_float32(np.concatenate(list(capture.states.values()))).astype(np.float64)
    assert found == pytest.approx(
        {f"layer_{layer}_variance": everything[:, i].var() for i, layer in enumerate((2, 5, 8))}, rel=1e-9
    )


def test_sequences_longer_than_a_block_of_rows_pass_and_are_checked_to_the_end(tmp_path: Path) -> None:
    bits = np.full((5000, 3, 16), ONE, dtype=np.uint16)
    bits[:, :, ::2] = 0
    capture = Capture(tmp_path, {"long": bits}, {"long": np.arange(5000, dtype=np.int32)})
    # Half of the values are 1, half 0: the variance is 1/4.
    assert capture.check(capture.seal())["layer_5_variance"] == 0.25
    bits[4999, 1, 3] = NAN
    damaged = Capture(tmp_path / "damaged", {"long": bits}, capture.tokens)
    with pytest.raises(CaptureError, match="sequence long: the states of layer 5 are not finite at position 4999"):
        damaged.check(damaged.seal())


def test_the_variance_of_many_rows_is_estimated_from_some_of_all_parts(tmp_path: Path) -> None:
    # A layer that varies in one sequence of many only: 1 in half of its values.
    bits = np.full((40_000, 3, 16), ONE, dtype=np.uint16)
    bits[30_000:40_000, 1, ::2] = 0x4000  # 2.0
    capture = Capture(tmp_path, {"long": bits}, {"long": np.arange(40_000, dtype=np.int32)})
    with pytest.raises(CaptureError, match="layer 2 have variance 0 over the chunk"):
        capture.check(capture.seal())
    found = check_states(tmp_path, read_index(tmp_path), capture.tokens, GEOMETRY, 0.0, "c")
    # An eighth of the values is 2, the others are 1: 1/8 x 7/8.
    assert found["layer_5_variance"] == pytest.approx(7 / 64, rel=0.01)


@pytest.mark.parametrize("bits", [NAN, 0x7F80, 0xFF80], ids=["nan", "inf", "-inf"])
def test_values_that_are_not_finite_are_refused(capture: Capture, bits: int) -> None:
    capture.states["s1"][4, 2, 7] = bits
    expected = "chunk 000007, sequence s1: the states of layer 8 are not finite at position 4"
    with pytest.raises(CaptureError, match=expected):
        capture.check(capture.seal())


@pytest.mark.parametrize("bits", [0, 0x8000], ids=["0", "-0"])
def test_a_row_of_zeros_is_refused(capture: Capture, bits: int) -> None:
    capture.states["s2"][1, 0, :] = bits
    with pytest.raises(CaptureError, match="sequence s2: the states of layer 2 are all zero at position 1"):
        capture.check(capture.seal())


def test_a_layer_that_never_varies_is_refused(capture: Capture) -> None:
    for states in capture.states.values():
        states[:, 1, :] = ONE
    expected = "chunk 000007: the states of layer 5 have variance 0 over the chunk, .* asks for 1e-08"
    with pytest.raises(CaptureError, match=expected):
        capture.check(capture.seal())


def test_the_variance_that_is_asked_for_is_a_setting(capture: Capture) -> None:
    index = capture.seal()
    with pytest.raises(CaptureError, match="layer 2 have variance .* asks for 4"):
        capture.check(index, min_variance=4.0)


def test_ids_of_another_sequence_are_refused_with_position_expected_and_found(capture: Capture) -> None:
    wrong = capture.tokens["s3"].copy()
    wrong[2] = 777
    expected = rf"sequence s3: input_ids differ at position 2 \(expected {capture.tokens['s3'][2]}, got 777\)"
    with pytest.raises(CaptureError, match=expected):
        capture.check(capture.seal({"s3": wrong}))


def test_exchanged_sequences_are_refused(capture: Capture) -> None:
    index = capture.seal()
    names = ["s1" if name == "s0" else "s0" if name == "s1" else name for name in index["sequence_id"].to_pylist()]
    exchanged = index.set_column(0, "sequence_id", pa.array(names))
    with pytest.raises(CaptureError, match=r"sequence s1: 6 rows, expected 9"):
        capture.check(exchanged)


def _without_last(index: pa.Table) -> pa.Table:
    return index.slice(0, index.num_rows - 1)


def _twice(index: pa.Table) -> pa.Table:
    return pa.concat_tables([index, index.slice(0, 1)])


@pytest.mark.parametrize(("change", "found"), [(_without_last, 3), (_twice, 5)], ids=["missing", "twice"])
def test_a_sequence_missing_or_twice_is_refused(
    capture: Capture, change: Callable[[pa.Table], pa.Table], found: int
) -> None:
    index = change(capture.seal())
    with pytest.raises(CaptureError, match=f"chunk 000007: the index holds {found} sequences, expected 4, each once"):
        capture.check(index)


def test_a_shorter_sequence_is_refused(capture: Capture) -> None:
    capture.states["s1"] = capture.states["s1"][:-1]
    index = capture.seal({"s1": capture.tokens["s1"][:-1]})
    with pytest.raises(CaptureError, match="chunk 000007, sequence s1: 8 rows, expected 9"):
        capture.check(index)


def test_rows_of_another_shape_are_refused(capture: Capture) -> None:
    for name, states in capture.states.items():
        capture.states[name] = np.ascontiguousarray(states[:, :2])
    index = capture.seal(geometry=Geometry((2, 8), 16))
    with pytest.raises(CaptureError, match=r"chunk 000007, shard 0: rows of shape \(2, 16\), expected"):
        capture.check(index)
