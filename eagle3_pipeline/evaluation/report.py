"""The evaluation as a table and as Markdown."""

import math
from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

POOLED = "all"


def evaluation_table(rows: list[dict[str, Any]], tablefmt: str = "github") -> str:
    """Categories with acceptance length, acceptance by position, speed against the baseline.

    Args:
        rows: as in `evaluation.parquet`.
        tablefmt: a format of `tabulate`.
    """
    table = [
        [
            row["category"],
            row["num_prompts"],
            row["num_drafts"],
            f"{row['acceptance_length']:.3f}",
            " ".join(f"{rate:.2f}" for rate in row["acceptance_rates"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['baseline_tokens_per_s']:.1f}",
            f"{row['speed_up']:.2f}",
        ]
        for row in rows
    ]
    headers = [
        "category",
        "prompts",
        "draft steps",
        "acceptance length",
        "by position",
        "tok/s",
        "undrafted",
        "speed-up",
    ]
    return tabulate(table, headers, tablefmt=tablefmt, disable_numparse=True)


def simulation_table(metrics: Mapping[str, float], tablefmt: str = "github") -> str:
    """Accepted tokens per draft step: served, teacher-forced on the served sequences, and the untrained draft's.

    Args:
        metrics: of the evaluation: served_, simulated_ and untrained_accepted_per_draft.
        tablefmt: a format of `tabulate`.
    """
    names = {
        "served": "trained, served by vLLM",
        "simulated": "trained, simulated on the served sequences",
        "untrained": "untrained, simulated on the served sequences",
    }
    table = [[text, f"{metrics[f'{name}_accepted_per_draft']:.3f}"] for name, text in names.items()]
    return tabulate(table, ["draft", "accepted tokens per draft step"], tablefmt=tablefmt, disable_numparse=True)


def batch_table(by_batch: list[dict[str, float]], tablefmt: str = "github") -> str:
    """Speed with and without the draft at further batch sizes; empty if there are none."""
    rows = [
        [
            f"{row['batch_size']:.0f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['baseline_tokens_per_s']:.1f}",
            f"{row['speed_up']:.2f}",
        ]
        for row in by_batch
    ]
    headers = ["prompts at once", "tok/s", "undrafted", "speed-up"]
    return tabulate(rows, headers, tablefmt=tablefmt, disable_numparse=True) if rows else ""


def agrees(served: float, simulated: float, num_drafts: float, tolerance: float) -> bool:
    """Whether served and simulated accepted tokens per draft step are the same draft's.

    A gap is the most frequent sign of a draft that is served wrongly. Counts of accepted tokens vary about as a Poisson
    variable does, so chance is three standard deviations of their mean, sqrt(mean / steps), and the smallest count (one
    token) where the mean is near zero.
    """
    chance = 3 * math.sqrt(max(simulated, 1 / max(num_drafts, 1)) / max(num_drafts, 1))
    return abs(served - simulated) <= tolerance * simulated + chance


def data_scale_notes(training: Mapping[str, float]) -> list[str]:
    """A warning, with numbers, where there is less to learn from than there is to remember.

    Args:
        training: metrics of the checkpoint.
    """
    tokens, parameters = training.get("supervised_tokens_train"), training.get("trainable_parameters")
    if not tokens or not parameters or tokens >= parameters:
        return []
    return [
        f"Little data: {tokens:,.0f} supervised tokens in {training['sequences_train']:,.0f} sequences for "
        f"{parameters:,.0f} trained parameters. Below one token a parameter, more data raises acceptance more than "
        "longer training does."
    ]


def markdown_report(
    pipeline: str,
    rows: list[dict[str, Any]],
    metrics: dict[str, float],
    by_batch: list[dict[str, float]],
    notes: list[str],
) -> str:
    """`report.md`."""
    parts = [f"# Evaluation of {pipeline}", evaluation_table(rows), simulation_table(metrics)]
    parts += [table] if (table := batch_table(by_batch)) else []
    parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"
