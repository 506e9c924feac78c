"""Sources that are larger than memory should be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_pipeline_tests.store.children import REPOSITORY

FILE_BYTES = 5 * 10**9
MOST_BYTES = 10**9
ROW_CHARS = 1500
CHILD = """
import json, sys
from pathlib import Path
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.dataset import materialise_dataset

home = Path(sys.argv[1])
spec = PipelineSpec.model_validate(
    {"name": "large", "verifier": {"model": "none"}, "dataset": {"path": str(home / "*.jsonl"), "format": "prompt"}}
)
context = StageContext(spec, home=home / "home", num_gpus=0)
context.registry.sync(spec)
chunks = context.registry.chunks()
made = [materialise_dataset(context, chunk.key).manifest.metrics for chunk in (chunks[0], chunks[-1])]
context.registry.sync(spec)
# Not `ru_maxrss`, which a process inherits from the one that started it.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) * 1024
rows = sum(chunk.num_rows for chunk in chunks)
duplicates = sum(len(chunk.duplicate_rows) for chunk in chunks)
print(json.dumps({"rows": rows, "duplicates": duplicates, "made": made, "peak": peak}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_gigabytes_are_read_in_less_than_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "x" * ROW_CHARS
    path = tmp_path / "large.jsonl"
    num_rows = 0
    with path.open("w") as file:
        while file.tell() < FILE_BYTES:
            file.writelines(f'{{"prompt": "{number} {body}"}}\n' for number in range(num_rows, num_rows + 10_000))
            num_rows += 10_000
        # The last row repeats the first.
        file.write(f'{{"prompt": "new"}}\n{{"id": 1, "prompt": "0 {body}"}}\n')
        num_rows += 2
    try:
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=False, cwd=REPOSITORY
        )
    finally:
        path.unlink()
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\n{FILE_BYTES / 1e9:.0f} GB of JSONL, {num_rows:,} rows: peak memory {found['peak'] / 1e6:,.0f} MB")
    assert (found["rows"], found["duplicates"]) == (num_rows, 1)
    first, last = found["made"]
    assert (first["num_samples"], first["num_rejected"]) == (1000, 0)
    assert last["num_read"] == num_rows % 1000 and last["num_rejected"] == 1
    assert found["peak"] < MOST_BYTES
