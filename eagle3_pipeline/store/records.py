"""What became of captured sequences: a line each in `records.jsonl`, which the shards' writers leave."""

import json
from collections import Counter
from pathlib import Path

from eagle3_pipeline.store.shards import RECORDS_NAME, Geometry, ShardRecord, rows_checksum, shard_name
from eagle3_pipeline.store.threads import in_threads


def read_records(folder: Path, offset: int = 0) -> tuple[list[ShardRecord], int]:
    """Complete records from a byte offset on, and the offset after them.

    A torn last line is left for later; one that a later process wrote behind is passed over.
    """
    try:
        with (folder / RECORDS_NAME).open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    complete = data[: data.rfind(b"\n") + 1]
    found = [_parse_record(line) for line in complete.splitlines()]
    return [record for record in found if record], offset + len(complete)


def _parse_record(line: bytes) -> ShardRecord | None:
    try:
        return ShardRecord(**json.loads(line))
    except (ValueError, TypeError):
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
    return [record for record in read_records(folder)[0] if not record.error]


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
