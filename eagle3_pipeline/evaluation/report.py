"""The evaluation as a table and as Markdown."""

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


def simulation_table(served: float, simulated: float, untrained: float, tablefmt: str = "github") -> str:
    """Accepted tokens per draft step: served, teacher-forced on the served sequences, and the untrained draft's.

    Args:
        served: trained draft, from vLLM's counters.
        simulated: trained draft, teacher-forced.
        untrained: the draft before its first step, teacher-forced.
        tablefmt: a format of `tabulate`.
    """
    table = [
        ["trained, served by vLLM", f"{served:.3f}"],
        ["trained, simulated on the served sequences", f"{simulated:.3f}"],
        ["untrained, simulated on the served sequences", f"{untrained:.3f}"],
    ]
    return tabulate(table, ["draft", "accepted tokens per draft step"], tablefmt=tablefmt, disable_numparse=True)


def markdown_report(pipeline: str, rows: list[dict[str, Any]], metrics: dict[str, float], notes: list[str]) -> str:
    """`report.md`."""
    accepted = [metrics[f"{name}_accepted_per_draft"] for name in ("served", "simulated", "untrained")]
    parts = [f"# Evaluation of {pipeline}", evaluation_table(rows), simulation_table(*accepted)]
    parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"
