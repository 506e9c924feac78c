"""The prompts of the quality benchmark: many, different, the same everywhere, none of them an evaluation prompt."""

import hashlib
import json
from collections import Counter
from pathlib import Path

from eagle3_pipeline.data.decontamination import Decontamination
from eagle3_pipeline.evaluation.prompts import load_prompts
from eagle3_pipeline_tests.benchmarks.one_gpu.quality_prompts import (
    HELD_OUT,
    TEMPLATES,
    draw_prompts,
    write_evaluation,
    write_prompts,
)

COUNT = 13_000


def test_there_are_enough_different_prompts_of_every_kind() -> None:
    prompts = draw_prompts(COUNT)
    assert len(set(prompts)) == COUNT
    openings = Counter(" ".join(prompt.split()[:3]) for prompt in prompts)
    assert len(openings) > 200
    assert not any("{" in prompt for prompt in prompts)
    assert len(TEMPLATES) >= 16


def test_the_draw_is_the_same_everywhere_and_a_slice_is_a_beginning() -> None:
    prompts = draw_prompts(COUNT)
    assert draw_prompts(1000) == prompts[:1000]
    found = hashlib.sha256("\n".join(prompts).encode()).hexdigest()
    assert found[:16] == "17f5c04ced810570"


def test_no_training_prompt_is_an_evaluation_prompt(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "held_out.jsonl", 8)
    held_out = load_prompts(str(tmp_path / "held_out.jsonl"))
    assert min(Counter(prompt.category for prompt in held_out).values()) >= 8
    assert set(HELD_OUT) < {prompt.category for prompt in held_out}
    decontamination = Decontamination(prompt.prompt for prompt in held_out)
    hits = [p for p in draw_prompts(COUNT) if decontamination.check([{"role": "user", "content": p}])]
    assert hits == []


def test_the_file_is_a_data_set_of_prompts(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 20)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == draw_prompts(20)
