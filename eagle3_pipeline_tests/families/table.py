"""The table of families in docs/verifiers.md."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

DOC = Path(__file__).parents[2] / "docs" / "verifiers.md"
HEADER = """# Verifier families

How a verifier makes logits of its last layer's output is asked of its own class in Transformers: kind and gain of the
final norm, epsilon, biases, a factor on the logits, a cap (`eagle3_pipeline/verifiers/measure.py`). Training,
simulation and the check of captured states use the one formula that is found. A verifier whose formula is not known is
refused by preflight.

The rows below are of tiny random models, one of each family, with norms and biases that are not neutral. *Preflight* is
what it says of training and evaluation (`ok with draft.x`: once the keys that it asks for are given). *Argmax* and *KL*
compare the teacher's logits with those of Transformers in float32 on the same states. What vLLM can capture from is
another question: the second table.

`python -m eagle3_pipeline_tests.families` writes this file (Transformers {transformers}); with names of families it
prints their rows.

| family | architecture | preflight | argmax | KL |
|---|---|---|---|---|
"""


CAPTURE = Path(__file__).parent / "capture.jsonl"
CAPTURE_HEADER = """
## What vLLM captures

Decoding while capturing against a prefill of the same tokens, as every engine's smoke test compares them, on a CPU (AMD
EPYC without AMX; vLLM's version is in the table). *Without drafts* is the faster way
(`eagle3_pipeline/engine/corrections.py`), which applies to the architectures for which it is right here; *as vLLM does
it* is the way of all others. Where neither is right, states come from a prefill.
`python -m eagle3_pipeline_tests.families.decoding` prints what the table is made of.

| family | architecture | vLLM | way | states of decoded tokens |
|---|---|---|---|---|
"""
_WAYS = {"undrafted": "without drafts", "vllm": "as vLLM does it"}


def capture_results() -> list[dict[str, Any]]:
    """What `decoding` printed for each family."""
    return [json.loads(line) for line in CAPTURE.read_text().splitlines()]


def capture_lines() -> list[str]:
    """Rows of the second table."""
    lines = []
    for row in capture_results():
        if "error" in row:
            found = f"refused: {row['error'].partition(': ')[2]}"
        else:
            off = row["answers"][">0.3"]
            found = "right" if row["smoke"]["may_decode"] else f"wrong: {off:.0%} of rows differ by more than 30 %"
        way = _WAYS[row["mode"]]
        lines.append(f"| {row['kind']} | {row['architecture']} | {row['vllm']} | {way} | {found} |")
    return lines


def write_table(lines: list[str]) -> str:
    """The whole file."""
    first = HEADER.format(transformers=version("transformers")) + "\n".join(lines) + "\n"
    return first + CAPTURE_HEADER + "\n".join(capture_lines()) + "\n"


def documented() -> dict[str, str]:
    """Rows of the file by family."""
    first = DOC.read_text().partition(CAPTURE_HEADER)[0]
    lines = [line for line in first.splitlines() if line.startswith("| ") and not line.startswith("| family")]
    return {line.split("|")[1].strip(): line for line in lines}
