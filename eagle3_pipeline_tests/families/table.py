"""The table of families in docs/verifiers.md."""

from importlib.metadata import version
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "verifiers.md"
HEADER = """# Verifier families

How a verifier makes logits of its last layer's output is asked of its own class in Transformers: kind and gain of the
final norm, epsilon, biases, a factor on the logits, a cap (`eagle3_pipeline/verifiers/measure.py`). Training,
simulation and the check of captured states use the one formula that is found. A verifier whose formula is not known is
refused by preflight.

The rows below are of tiny random models, one of each family, with norms and biases that are not neutral. *Preflight* is
what it says of training and evaluation (`ok with draft.x`: once the keys that it asks for are given). *Argmax* and *KL*
compare the teacher's logits with those of Transformers in float32 on the same states. What vLLM can capture from is
another question, to which preflight has an answer of its own.

`python -m eagle3_pipeline_tests.families` writes this file (Transformers {transformers}); with names of families it
prints their rows.

| family | architecture | preflight | argmax | KL |
|---|---|---|---|---|
"""


def write_table(lines: list[str]) -> str:
    """The whole file."""
    return HEADER.format(transformers=version("transformers")) + "\n".join(lines) + "\n"


def documented() -> dict[str, str]:
    """Rows of the file by family."""
    lines = [line for line in DOC.read_text().splitlines() if line.startswith("| ") and not line.startswith("| family")]
    return {line.split("|")[1].strip(): line for line in lines}
