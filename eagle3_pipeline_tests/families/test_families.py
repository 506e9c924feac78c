"""docs/verifiers.md says what is seen: preflight's answer, and the teacher's logits beside Transformers'."""

from pathlib import Path

import pytest

from eagle3_pipeline.engine import corrections
from eagle3_pipeline_tests.families.builders import KINDS
from eagle3_pipeline_tests.families.static import look_at
from eagle3_pipeline_tests.families.table import CAPTURE_HEADER, DOC, capture_lines, capture_results, documented

# A factor, a cap, a gain less one, a layer norm with biases, other names, a wrapper.
FAST = ("granite", "gemma2", "qwen3_next", "phi", "nemotron_h", "minicpm3", "mistral3")


@pytest.mark.parametrize("kind", [k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_the_teacher_is_the_verifier_and_the_table_says_so(kind: str, tmp_path: Path) -> None:
    row = look_at(kind, tmp_path / kind)
    if row.preflight.startswith("ok"):
        assert row.argmax == 1.0 and row.kl is not None and row.kl < 1e-3
    assert documented()[kind] == row.line()


def test_every_family_is_in_the_table() -> None:
    assert set(documented()) == set(KINDS)


def test_the_second_table_is_what_was_measured() -> None:
    assert DOC.read_text().endswith(CAPTURE_HEADER + "\n".join(capture_lines()) + "\n")


def test_capture_without_drafts_is_for_what_it_was_proved_for() -> None:
    """Of the version that was measured; Kimi's model is proved by its own end-to-end tests."""
    proved = {
        (row["architecture"], row["vllm"])
        for row in capture_results()
        if row["mode"] == "undrafted" and row.get("smoke", {}).get("may_decode")
    }
    applied = {(name, "0.32") for name, versions in corrections._UNDRAFTED_IN.items() if "0.32" in versions}
    assert applied - {("KimiK25ForConditionalGeneration", "0.32")} == proved
