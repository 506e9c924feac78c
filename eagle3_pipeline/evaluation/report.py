"""The evaluation as a table and as Markdown."""

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


def markdown_report(pipeline: str, rows: list[dict[str, Any]], metrics: dict[str, float], notes: list[str]) -> str:
    """`report.md`."""
    parts = [f"# Evaluation of {pipeline}", evaluation_table(rows), simulation_table(metrics)]
    parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"
