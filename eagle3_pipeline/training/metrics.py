"""The log of a training run: long-format rows, kept as Parquet."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

METRICS_NAME = "metrics.parquet"
SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("step", pa.int64()),
        ("epoch", pa.int64()),
        ("split", pa.string()),
        ("name", pa.string()),
        ("value", pa.float64()),
    ]
)


class MetricsLog:
    """Rows (kind: step or epoch, step, epoch, split: train or val, name, value)."""

    def __init__(self, saved: bytes | None = None) -> None:
        self._tables = [pq.read_table(io.BytesIO(saved))] if saved else []
        self._rows: list[tuple[str, int, int, str, str, float]] = []

    def add(self, kind: str, step: int, epoch: int, split: str, values: dict[str, float]) -> None:
        """Appends one row per value."""
        self._rows += [(kind, step, epoch, split, name, float(value)) for name, value in values.items()]

    def table(self) -> pa.Table:
        """All rows so far."""
        if self._rows or not self._tables:
            columns = zip(*self._rows, strict=True) if self._rows else [[]] * len(SCHEMA)
            self._tables.append(
                pa.Table.from_arrays([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
            )
            self._rows = []
        return pa.concat_tables(self._tables)

    def epoch_values(self, split: str, name: str) -> dict[int, float]:
        """Value of a per-epoch metric by epoch."""
        rows = self.table().to_pylist()
        return {r["epoch"]: r["value"] for r in rows if (r["kind"], r["split"], r["name"]) == ("epoch", split, name)}

    def to_bytes(self) -> bytes:
        """The rows as a Parquet file."""
        buffer = io.BytesIO()
        pq.write_table(self.table(), buffer)
        return buffer.getvalue()

    def write(self, folder: Path) -> None:
        """Writes `metrics.parquet`."""
        (folder / METRICS_NAME).write_bytes(self.to_bytes())
