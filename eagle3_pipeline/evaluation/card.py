"""The model card of a draft, in the form that the Hugging Face hub reads: YAML in front, Markdown behind."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from tabulate import tabulate

from eagle3_pipeline.evaluation.report import evaluation_table, simulation_table

_COUNT_NAMES = {
    "num_read": "source rows read",
    "num_samples": "conversations used",
    "num_sequences": "training sequences",
    "num_tokens": "tokens",
    "num_supervised_tokens": "supervised tokens",
    "num_truncated": "answers cut at the token limit",
}


@dataclass
class CardFacts:
    """What the card says.

    Attributes:
        pipeline: its name.
        verifier: Hugging Face id or folder.
        verifier_content: content id of its files.
        dataset: where the conversations came from.
        mode: regenerate or passthrough.
        num_chunks: chunks trained on.
        counts: rows, sequences, tokens over these chunks.
        rejected: rejected rows and turns by reason.
        coverage: share of supervised tokens in the draft vocabulary; `None` if it is not known any more.
        settings: sections of semantic keys.
        training: metrics of the checkpoint.
        evaluation: rows of `evaluation.parquet`.
        evaluation_metrics: metrics of the evaluation.
        decision: why this draft is the champion.
        tools: versions that evaluated it.
        fingerprints: by stage.
        curves: file name of the picture; empty: there is none.
        num_speculative_tokens: depth it was measured at.
        champion_before: acceptance lengths of the champion that it replaced, by category; empty: it is the first.
    """

    pipeline: str
    verifier: str
    verifier_content: str
    dataset: str
    mode: str
    num_chunks: int
    counts: dict[str, int]
    rejected: dict[str, int]
    coverage: float | None
    settings: dict[str, Any]
    training: dict[str, float]
    evaluation: list[dict[str, Any]]
    evaluation_metrics: dict[str, float]
    decision: str
    tools: dict[str, str]
    fingerprints: dict[str, str]
    curves: str
    num_speculative_tokens: int
    champion_before: dict[str, float] = field(default_factory=dict)


def model_card(facts: CardFacts) -> str:
    """`README.md` of the published folder."""
    front = {
        "base_model": facts.verifier,
        "library_name": "speculators",
        "tags": ["speculative-decoding", "eagle3"],
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# EAGLE-3 draft of {facts.verifier}\n\nMade by the pipeline `{facts.pipeline}`. {facts.decision[:1].upper()}"
        f"{facts.decision[1:]}.",
        _serving(facts),
        "## Evaluation\n\nServed by vLLM, greedy; acceptance length counts the bonus token.\n\n"
        + evaluation_table(facts.evaluation),
        simulation_table(facts.evaluation_metrics),
        _against_champion(facts),
        _data(facts),
        _training(facts),
        _origins(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _serving(facts: CardFacts) -> str:
    config = f'{{"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": {facts.num_speculative_tokens}}}'
    tested = ", ".join(f"{name} {version}" for name, version in facts.tools.items() if name.startswith("vllm"))
    return f"```sh\nvllm serve {facts.verifier} --speculative-config '{config}'\n```\n\nTested with {tested or 'vLLM'}."


def _against_champion(facts: CardFacts) -> str:
    if not facts.champion_before:
        return ""
    rows = [
        [row["category"], f"{facts.champion_before[row['category']]:.3f}", f"{row['acceptance_length']:.3f}"]
        for row in facts.evaluation
        if row["category"] in facts.champion_before
    ]
    table = tabulate(rows, ["category", "champion before", "this draft"], tablefmt="github", disable_numparse=True)
    return f"## Against the champion before\n\nAcceptance length:\n\n{table}"


def _data(facts: CardFacts) -> str:
    answers = "the verifier's own" if facts.mode == "regenerate" else "those of the data set"
    rows: list[list[str]] = [["source", facts.dataset], ["answers", answers], ["chunks", f"{facts.num_chunks:,}"]]
    rows += [[text, f"{facts.counts[name]:,}"] for name, text in _COUNT_NAMES.items() if name in facts.counts]
    rows += [[f"rejected: {reason}", f"{count:,}"] for reason, count in sorted(facts.rejected.items())]
    coverage = "not known any more" if facts.coverage is None else f"{facts.coverage:.2%}"
    rows.append(["supervised tokens in the draft vocabulary", coverage])
    return "## Data\n\n" + tabulate(rows, ["", ""], tablefmt="github", disable_numparse=True)


def _training(facts: CardFacts) -> str:
    settings = tabulate(
        [[key, value] for key, value in _flat(facts.settings)],
        ["key", "value"],
        tablefmt="github",
        disable_numparse=True,
    )
    metrics = tabulate(
        [[name, f"{value:,.4g}"] for name, value in sorted(facts.training.items())],
        ["metric", "value"],
        tablefmt="github",
        disable_numparse=True,
    )
    picture = f"![Training curves]({facts.curves})\n\n" if facts.curves else ""
    return f"## Training\n\n{picture}{settings}\n\n{metrics}"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in settings.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", "" if value is None else str(value)))
    return found


def _origins(facts: CardFacts) -> str:
    rows = [["verifier (content)", facts.verifier_content], *([k, v] for k, v in facts.fingerprints.items())]
    rows += [[name, version] for name, version in sorted(facts.tools.items())]
    table = tabulate(rows, ["", ""], tablefmt="github", disable_numparse=True)
    return f"## Where it comes from\n\n{table}\n\n`provenance.json` names every artifact it goes back to."
