"""The table of the quality benchmark, from what its steps left."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from eagle3_pipeline.evaluation.report import POOLED
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.draft_evaluation import EVALUATION
from eagle3_pipeline.store.manifest import Manifest
from eagle3_pipeline_tests.benchmarks.multi_gpu.report import Report
from eagle3_pipeline_tests.benchmarks.one_gpu.quality_chain import DRAFTS, FULL, SPEED, USUAL, Quality

_WANTED = 2.0
_MOST_TOKENS = 8
_TRAINED = (
    ("num_tokens", "tokens of its data"),
    ("sequences_train", "sequences that train"),
    ("epochs", "epochs"),
    ("best_epoch", "best epoch"),
    ("steps", "steps"),
    ("tokens_per_s", "training tok/s"),
    ("data_wait_share", "share of a step that waits for data"),
    ("val_acceptance_length", "acceptance length, own validation (teacher-forced)"),
    ("initial_val_acceptance_length", "the same before training"),
    ("val_loss", "validation loss"),
    ("train_loss", "training loss of the best epoch"),
    ("outside_draft_vocab_share", "share of validation tokens outside the draft vocabulary"),
)


def fill_table(quality: Quality, report: Report) -> None:
    """Rows of everything that ran; says what did not."""
    fill_data(quality, report)
    for name in [draft for draft in DRAFTS if draft not in (SPEED, USUAL)]:
        fill_trained(quality, report, name)
    _usual(quality, report)
    for name in [draft for draft in DRAFTS if draft != SPEED]:
        for num_tokens in range(1, _MOST_TOKENS + 1):
            fill_served(quality, report, name, num_tokens)
    _judge(quality, report)


def fill_served(quality: Quality, report: Report, name: str, num_tokens: int) -> None:
    """Rows of a served draft, if it was served."""
    if found := quality.served(name, num_tokens):
        _served(report, f"{name}, {num_tokens} drafted", *found)


def fill_data(quality: Quality, report: Report) -> None:
    """Rows of answers, states and the vocabulary map."""
    context = quality.context(FULL)
    made = {key: context.last_manifest(ids.SYNTHETIC_GENERATIONS, key) for key in context.all_chunks()}
    states = {key: context.last_manifest(ids.HIDDEN_STATES, key) for key in made}
    done = [m for m in made.values() if m]
    report.check("all chunks are there", len(done) == len(made) and all(states.values()), f"{len(done)} of {len(made)}")
    for metric in ("num_sequences", "num_rejected", "num_tokens", "num_supervised_tokens", "num_truncated"):
        report.row("data", metric, sum(m.metrics[metric] for m in done))
    if done:
        speed = sum(m.metrics["new_tokens_per_s"] for m in done) / len(done)
        report.row("data", "generation with capture, mean of the chunks", speed, "new tok/s")
    agreements = [
        m.metrics["next_token_agreement"] for m in states.values() if m and "next_token_agreement" in m.metrics
    ]
    if agreements:
        report.row("data", "smallest agreement of the states with the next token", min(agreements))
    seconds = sum(m.wall_s for m in (*made.values(), *states.values()) if m)
    report.row("data", "seconds of both stages, all chunks (two at a time)", seconds, "s")
    if vocab := context.last_manifest(ids.VOCAB_MAP):
        report.row("data", "draft vocabulary covers", vocab.metrics["coverage"])


def fill_trained(quality: Quality, report: Report, name: str) -> None:
    """Rows of a draft's training."""
    context = quality.context(name)
    if not (made := context.last_manifest(ids.DRAFT_CHECKPOINT)):
        report.skip(f"train {name}", "no checkpoint")
        return
    part = f"training: {name}"
    report.row(part, "whole stage", made.wall_s, "s")
    for metric, what in _TRAINED:
        if metric in made.metrics:
            report.row(part, what, made.metrics[metric])
    for who, found in quality.read_note(f"simulation-{name}").items():
        _simulated(report, f"teacher-forced on the served sequences: {name}", who, found)


def _simulated(report: Report, part: str, who: str, found: dict[str, Any]) -> None:
    report.row(part, f"{who}: acceptance length", found["acceptance_length"])
    for position, share in enumerate(found["full_acc"], 1):
        report.row(part, f"{who}: token {position} and all before it accepted", share)
    report.row(part, f"{who}: verifier's choice outside the draft vocabulary", found["outside_draft_vocab_share"])


def _usual(quality: Quality, report: Report) -> None:
    found = quality.read_note(USUAL)
    if not found:
        report.skip(USUAL, "not trained")
        return
    units = {"limit_s": "s", "start_s": "s", "trained_s": "s", "epochs_of_schedule": "", "epochs_saved": ""}
    for name, unit in units.items():
        report.row("training: usual", name, float(found[name]), unit)
    report.row("training: usual", "last logged step", float(found["last_logged_step"]))
    report.log(f"usual: checkpoint {found['checkpoint']}; validation by epoch: {found['validation']}")


def _served(report: Report, part: str, manifest: Manifest, folder: Path) -> None:
    for row in pq.read_table(folder / EVALUATION).to_pylist():
        where = "all" if row["category"] == POOLED else row["category"]
        report.row(part, f"{where} ({row['num_prompts']}): acceptance length", row["acceptance_length"])
        if row["category"] == POOLED:
            for position, rate in enumerate(row["acceptance_rates"], 1):
                report.row(part, f"all: draft token {position} accepted", rate)
            report.row(part, "all: answers that differ from the undrafted", row["num_differences"])
            _speeds(report, part, row, manifest)
    if "simulated_accepted_per_draft" in manifest.metrics:
        simulated = 1 + manifest.metrics["simulated_accepted_per_draft"]
        report.row(part, "all: acceptance length, teacher-forced", simulated)


def _speeds(report: Report, part: str, pooled: dict[str, Any], manifest: Manifest) -> None:
    speeds = {"1": (pooled["tokens_per_s"], pooled["speed_up"])}
    for name, value in manifest.metrics.items():
        if name.startswith("tokens_per_s_batch_"):
            batch = name.removeprefix("tokens_per_s_batch_")
            speeds[batch] = value, manifest.metrics[f"speed_up_batch_{batch}"]
    for batch, (speed, speed_up) in speeds.items():
        report.row(part, f"batch {batch}", speed, "new tok/s")
        report.row(part, f"batch {batch}: speed-up", speed_up)


def _judge(quality: Quality, report: Report) -> None:
    found = quality.served(FULL, 3)
    if not found:
        report.skip("acceptance length at 3 drafted tokens", "not served")
        return
    length = found[0].metrics["acceptance_length"]
    report.check(f"served acceptance length is at least {_WANTED}", length >= _WANTED, f"{length:.3f}")
    if usual := quality.served(USUAL, 3):
        other = usual[0].metrics["acceptance_length"]
        report.check("it is at least that of the usual draft", length >= other, f"{length:.3f} and {other:.3f}")
