"""Engines over all GPUs of this host, on tiny models; the benchmark `multi_gpu` does the same on large ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_pipeline.engine.devices import count_gpus
from eagle3_pipeline_tests.benchmarks.multi_gpu.engines import Engines
from eagle3_pipeline_tests.benchmarks.multi_gpu.report import Report
from eagle3_pipeline_tests.benchmarks.multi_gpu.sizes import ON_CPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(count_gpus() < 2, reason="fewer than two GPUs"),
]
# As many as the tiny model has heads for.
NUM_GPUS = min(8, 1 << (count_gpus().bit_length() - 1)) if count_gpus() else 0


def test_engines_side_by_side_and_tensor_parallel_capture_the_same_states(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.json", NUM_GPUS, 800.0)
    sizes = replace(ON_CPU, utilization=0.2, start_s=0.0, kimi_dtype="bfloat16")
    Engines(report, sizes, tmp_path, NUM_GPUS).run()
    assert report.checks and all(check["passed"] for check in report.checks), report.checks
