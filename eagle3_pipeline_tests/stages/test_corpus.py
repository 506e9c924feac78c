"""Malformed data stops no chunk, and every row is accounted for."""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tabulate import tabulate

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.errors import DataError
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.dataset import CONVERSATIONS, REJECTED, materialise_dataset
from eagle3_pipeline_tests.data.corpus import write_corpus

Rows = dict[str, list[tuple[str, str]]]


def make_context(home: Path, **dataset: Any) -> StageContext:
    section = {"path": str(home / "corpus" / "*"), "samples_per_chunk": 40, "min_yield": 0.0, **dataset}
    spec = PipelineSpec.model_validate({"name": "corpus", "verifier": {"model": "none"}, "dataset": section})
    return StageContext(spec, lambda _: None, home / "home", num_gpus=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[StageContext, Rows, dict[str, dict[int, str]]]:
    """The context, what each row should become, and what it became: reasons by file and row."""
    home = tmp_path_factory.mktemp("home")
    expected = write_corpus(home / "corpus")
    context = make_context(home)
    context.registry.sync(context.spec)
    found: dict[str, dict[int, str]] = {name: {} for name in expected}
    for chunk in context.registry.chunks():
        result = materialise_dataset(context, chunk.key)
        outcomes = found[Path(chunk.file).name]
        accepted = pq.read_table(result.artifact.path(CONVERSATIONS)).to_pylist()
        rejected = pq.read_table(result.artifact.path(REJECTED)).to_pylist()
        metrics = result.manifest.metrics
        assert metrics["num_samples"] + metrics["num_rejected"] == metrics["num_read"] == chunk.num_rows
        assert (len(accepted), len(rejected)) == (metrics["num_samples"], metrics["num_rejected"])
        assert Counter(row["reason"] for row in rejected) == result.manifest.rejected
        for row in accepted:
            assert outcomes.setdefault(row["row_number"], "") == ""
        for row in rejected:
            assert row["row_number"] not in outcomes and row["detail"]
            outcomes[row["row_number"]] = row["reason"]
    return context, expected, found


def test_every_row_of_every_file_is_accepted_or_rejected(corpus, capsys: pytest.CaptureFixture[str]) -> None:
    _, expected, found = corpus
    assert {name: sorted(rows) for name, rows in found.items()} == {
        name: list(range(len(rows))) for name, rows in expected.items()
    }
    kinds = {kind for rows in expected.values() for kind, _ in rows}
    assert sum(map(len, expected.values())) >= 200 and len(kinds) >= 12
    with capsys.disabled():
        print("\n" + _table(expected, found))


def _table(expected: Rows, found: dict[str, dict[int, str]]) -> str:
    counts: dict[str, Counter[str]] = {}
    for name, rows in expected.items():
        for number, (kind, _) in enumerate(rows):
            counts.setdefault(kind, Counter())[found[name][number]] += 1
    lines = [
        [kind, counted[""], counted.total() - counted[""], ", ".join(sorted(reason for reason in counted if reason))]
        for kind, counted in sorted(counts.items())
    ]
    totals = [sum(line[i] for line in lines) for i in (1, 2)]  # type: ignore[misc]
    return tabulate([*lines, ["all", *totals, f"{sum(totals)} rows read"]], ["kind", "accepted", "rejected", "reason"])


def test_every_row_has_the_outcome_that_its_kind_asks_for(corpus) -> None:
    _, expected, found = corpus
    wrong = {
        (name, number): (kind, reason, found[name][number])
        for name, rows in expected.items()
        for number, (kind, reason) in enumerate(rows)
        if found[name][number] != reason
    }
    assert wrong == {}


def test_too_few_usable_rows_fail_a_chunk_and_keep_its_rejections(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text('id,prompt\n1,"ask"\n{"prompt": "x"}\n')
    context = make_context(tmp_path, min_yield=0.5)
    context.registry.sync(context.spec)
    with pytest.raises(DataError, match=r"1 of 3 rows are usable, .* asks for 50%; rejected: bad_json 2") as caught:
        materialise_dataset(context, "000000")
    kept = pq.read_table(str(caught.value).split("all of them: ")[1].split(". Repair")[0]).to_pylist()
    assert [(row["row_number"], row["raw"]) for row in kept] == [(0, "id,prompt\n"), (1, '1,"ask"\n')]
