"""What became of captured sequences: a line each in `records.jsonl`, which the shards' writers leave."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from eagle3_pipeline.store.shards import RECORDS_NAME, Geometry, ShardRecord, rows_checksum, shard_name
from eagle3_pipeline.store.threads import in_threads

_READ_BYTES = 2**20


class RecordReader:
    """Reads the records of a folder as they are written; its file need not be there yet."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORDS_NAME
        self._descriptor = -1
        self._offset = 0

    def read(self) -> list[ShardRecord]:
        """Complete records since the last call.

        A torn last line is left for later; one that a later process wrote behind is passed over.
        """
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY)
            except FileNotFoundError:
                return []
        data = b"".join(self._blocks())
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        found = [_parse_record(line) for line in complete.splitlines()]
        return [record for record in found if record]

    def _blocks(self) -> Iterator[bytes]:
        position = self._offset
        while block := os.pread(self._descriptor, _READ_BYTES, position):
            yield block
            position += len(block)

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_records(folder: Path) -> list[ShardRecord]:
    """All complete records of a folder."""
    with contextlib.closing(RecordReader(folder)) as reader:
        return reader.read()


def _parse_record(line: bytes) -> ShardRecord | None:
    try:
        record = ShardRecord(**json.loads(line))
        texts = [record.sequence_id, record.checksum, record.error, record.fault, record.ids]
        numbers = [record.shard, record.row_start, record.num_tokens]
        sound = all(type(text) is str for text in texts) and all(type(n) is int and -1 <= n < 2**40 for n in numbers)
        return record if sound and (record.error or min(numbers) >= 0) else None
    except (ValueError, TypeError, RecursionError):
        return None


def written_records(folder: Path, geometry: Geometry) -> dict[str, ShardRecord]:
    """A record of each sequence after a pass, by its id.

    A pass begins with `intact_records` and writes what is not there, so a sequence's only record is good. Of several,
    left by passes that were cut off, any may be damaged.
    """
    records = _recorded(folder)
    counts = Counter(record.sequence_id for record in records)
    single = {record.sequence_id: record for record in records if counts[record.sequence_id] == 1}
    return single | _intact(folder, [r for r in records if r.sequence_id not in single], geometry)


def intact_records(folder: Path, geometry: Geometry) -> dict[str, ShardRecord]:
    """Records of an earlier process whose bytes are still there and match their checksums, by sequence id."""
    return _intact(folder, _recorded(folder), geometry)


def _recorded(folder: Path) -> list[ShardRecord]:
    return [record for record in read_records(folder) if not record.error]


def _intact(folder: Path, records: list[ShardRecord], geometry: Geometry) -> dict[str, ShardRecord]:
    intact = in_threads(lambda record: _is_intact(folder, record, geometry.row_bytes), records)
    return {record.sequence_id: record for record, whole in zip(records, intact, strict=True) if whole}


def _is_intact(folder: Path, record: ShardRecord, row_bytes: int) -> bool:
    """Whether the recorded rows are there."""
    path = folder / shard_name(record.shard)
    try:
        return rows_checksum(path, record.row_start, record.num_tokens, row_bytes) == record.checksum
    except FileNotFoundError:
        return False
