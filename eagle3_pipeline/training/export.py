"""Writes the draft as the folder that vLLM loads, and checks what was written."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import LlamaConfig

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.draft_config import expected_tensors
from eagle3_pipeline.training.draft_model import WEIGHTS_NAME, VocabMap
from eagle3_pipeline.training.job import Job

CONFIG_NAME = "config.json"
# Without a limit of this size Transformers splits large drafts over several files.
_ONE_FILE = "1TB"


def export_draft(model: Eagle3DraftModel, folder: Path) -> None:
    """Saves the draft in bf16 as `config.json` and `model.safetensors`; the model itself becomes bf16.

    Raises:
        TrainingError: a weight is not finite.
    """
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise TrainingError(f"the draft's {name} holds values that are not finite; nothing was exported")
    model.to(device="cpu", dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=_ONE_FILE)
    # speculators copies the source of its config class; neither it nor vLLM reads it.
    (folder / "config.py").unlink(missing_ok=True)
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text())
    config.pop("auto_map", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    os.chmod(folder / WEIGHTS_NAME, 0o644)


def check_export(folder: Path, job: Job, layers: LlamaConfig, vocab_map: VocabMap) -> None:
    """Compares an exported draft with what the job asks for, wherever vLLM would read something else in silence.

    Raises:
        TrainingError: a tensor is missing, unknown or of another shape; the vocabulary is not the map's; or a layer id,
            a norm flag or the geometry in config.json is not the job's.
    """
    vocab_size = len(vocab_map.d2t)
    tensors = expected_tensors(layers, vocab_size, len(job.aux_layer_ids), job.draft.norm_before_fc)
    check_tensors(folder / WEIGHTS_NAME, tensors)
    if "d2t" in tensors:
        with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
            for name, wanted in (("d2t", vocab_map.d2t), ("t2d", vocab_map.t2d)):
                if not torch.equal(file.get_tensor(name), wanted):
                    raise TrainingError(
                        f"{folder / WEIGHTS_NAME}: {name} is not that of the vocabulary map (d2t holds offsets: the "
                        "verifier's id of draft token i is i + d2t[i])"
                    )
    config = json.loads((folder / CONFIG_NAME).read_text())
    expected = {
        "eagle_aux_hidden_state_layer_ids": list(job.aux_layer_ids),
        "norm_before_residual": job.draft.norm_before_residual,
        "norm_before_fc": job.draft.norm_before_fc,
        "norm_output": False,
        "fc_norm": False,
        "draft_vocab_size": vocab_size,
    }
    wrong = [f"{key} is {config.get(key)!r}, expected {v!r}" for key, v in expected.items() if config.get(key) != v]
    inner, wanted_inner = config.get("transformer_layer_config", {}), layers.to_dict()
    keys = ("head_dim", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")
    found = ((key, inner.get(key), wanted_inner[key]) for key in keys)
    wrong += [f"{key} is {value!r}, expected {wanted!r}" for key, value, wanted in found if value != wanted]
    if wrong:
        raise TrainingError(f"{folder / CONFIG_NAME}: {'; '.join(wrong)}")


def check_tensors(path: Path, expected: dict[str, Any]) -> None:
    """Compares a safetensors header with the expected names, types and shapes.

    Raises:
        TrainingError: lists the differences.
    """
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        slices = {name: file.get_slice(name) for name in names}
        found = {name: (s.get_dtype(), list(s.get_shape())) for name, s in slices.items()}
    wrong = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
    if wrong:
        lines = "".join(f"\n  {n}: found {found.get(n, 'none')}, expected {expected.get(n, 'none')}" for n in wrong)
        raise TrainingError(f"{path} is not the draft that vLLM loads:{lines}")
