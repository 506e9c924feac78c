"""What a verifier's drafts are trained on otherwise than release 0.1.0 did: part of their checkpoints' fingerprints.

That release recomputed logits as an RMS norm with `rms_norm_eps` and the output layer, and knew from a list which types
store the norm's gain less one. What it did right for a verifier stays fresh; everything else is another draft.
"""

import math
from pathlib import Path
from typing import Any

from eagle3_pipeline.verifiers.ask import ask
from eagle3_pipeline.verifiers.formula import Asked, HeadFormula
from eagle3_pipeline.verifiers.sizes import mlp_width
from eagle3_pipeline.verifiers.tensors import stored_beside

# The list of 0.1.0, never to be added to.
_PLUS_ONE_TYPES_0_1_0 = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "qwen3_5",
    "qwen3_5_text",
    "recurrent_gemma",
)


def changed_head(folder: Path) -> dict[str, Any]:
    """Input of a checkpoint's fingerprint: the verifier's head, where 0.1.0 took another one for it; else nothing."""
    asked = ask(folder)
    if asked.formula is None:
        return {}
    # That release took a stored output layer even where the config ties it to the embeddings.
    other = stored_beside(folder, asked)
    if _as_in_0_1_0(asked, asked.formula) and not other:
        return {}
    biases = {"norm_bias": bool(asked.names.norm_bias), "head_bias": bool(asked.names.head_bias)}
    tied = {"tied": True} if other else {}
    return {"verifier_head": {**asked.formula.rounded(), **biases, **tied}}


def _as_in_0_1_0(asked: Asked, formula: HeadFormula) -> bool:
    eps, kind = asked.config.get("rms_norm_eps"), asked.config.get("model_type")
    same_norm = formula.norm == "rms" and formula.gain_offset == float(kind in _PLUS_ONE_TYPES_0_1_0)
    same_eps = isinstance(eps, float | int) and math.isclose(eps, formula.eps, rel_tol=1e-2)
    plain = (formula.scale, formula.bias_scale, formula.softcap) == (1.0, 1.0, None)
    return same_norm and same_eps and plain and not asked.names.norm_bias and not asked.names.head_bias


def changed_width(folder: Path) -> dict[str, Any]:
    """Input of a checkpoint's fingerprint: the draft's MLP, where 0.1.0 took an expert's size for it; else nothing."""
    config = ask(folder).config
    width = mlp_width(config)
    return {} if width == config.get("intermediate_size") or width is None else {"draft_intermediate_size": width}
