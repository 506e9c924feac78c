"""No engine: what preflight says of a family, and the teacher's logits against Transformers' own in float32."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as T

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.verifier_head import load_head
from eagle3_pipeline.engine.preflight import Check
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.draft_checks import draft_checks
from eagle3_pipeline.training.draft_config import read_verifier_config
from eagle3_pipeline.training.draft_model import load_verifier_weights
from eagle3_pipeline_tests.families.builders import make_family

NUM_TOKENS = 48
# What a refusal may ask for, and a value for it.
GIVEN: dict[str, Any] = {
    "head_dim": 64,
    "rope_theta": 10000.0,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
}
FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "embedding_norm", "final_norm", "ln_f")


@dataclass(frozen=True)
class Row:
    """A family in the table.

    Attributes:
        family: name of the builder.
        architecture: class name.
        preflight: "ok", "ok with draft.x", or the refusal.
        argmax: share of rows in which the teacher's likeliest token is Transformers'; `None`: there is no teacher.
        kl: mean KL divergence of the teacher from Transformers, of the worse of training and check.
    """

    family: str
    architecture: str
    preflight: str
    argmax: float | None
    kl: float | None

    def line(self) -> str:
        """The row as Markdown; the columns of the engine are empty."""
        shown = "" if self.argmax is None else f"{self.argmax:.0%}"
        kl = "" if self.kl is None else "< 1e-3" if self.kl < 1e-3 else f"{self.kl:.2g}"
        return f"| {self.family} | {self.architecture} | {self.preflight} | {shown} | {kl} |"


def look_at(kind: str, folder: Path) -> Row:
    """Makes the family's model in `folder` and compares."""
    make_family(kind, folder)
    config = json.loads((folder / "config.json").read_text())
    preflight = _preflight(folder)
    found = teacher(folder)
    return Row(kind, config["architectures"][0], preflight, *(found or (None, None)))


def _preflight(folder: Path) -> str:
    draft: dict[str, Any] = {}
    while True:
        failed = [check for check in checks(folder, draft) if not check.passed]
        if not failed:
            return "ok" + (" with " if draft else "") + ", ".join(f"`draft.{key}`" for key in draft)
        asked = next((key for key in GIVEN if f"draft.{key} must be given" in failed[0].found), None)
        if asked is None or asked in draft:
            return failed[0].found.replace(f"{folder}: ", "").replace("|", " ")
        draft[asked] = GIVEN[asked]


def checks(folder: Path, draft: dict[str, Any]) -> list[Check]:
    """Preflight's lines of training and evaluation for a model."""
    spec = PipelineSpec.model_validate(
        {
            "name": "p",
            "verifier": {"model": str(folder)},
            "dataset": {"path": "none"},
            "generation": {"max_new_tokens": 8, "max_sequence_tokens": 128},
            "vocab": {"draft_vocab_size": 64},
            "draft": draft,
            "resources": {"num_gpus": 0},
        }
    )
    return draft_checks(StageContext(spec, log=lambda _line: None, home=folder.parent / "home"))


@torch.no_grad()
def teacher(folder: Path) -> tuple[float, float] | None:
    """Argmax agreement and KL of both users of the head, training and check, on a model's own states."""
    logits, states = reference(folder)
    load_head.cache_clear()
    head = load_head(str(folder))
    if head is None:
        return None
    weights = load_verifier_weights(folder, read_verifier_config(folder, False))
    both = (torch.from_numpy(head.logits(states.numpy())), weights.output_layer()(weights.norm_module()(states)))
    found = [_compare(logits, one.float()) for one in both]
    return min(argmax for argmax, _ in found), max(kl for _, kl in found)


def reference(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] and states before the final norm [n, H] of some tokens, by Transformers in float32."""
    wrapped = "text_config" in json.loads((folder / "config.json").read_text())
    auto = T.AutoModelForImageTextToText if wrapped else T.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(3, 250, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(3))
    seen: list[torch.Tensor] = []
    hook = _final_norm(model).register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append((args[0] if args else next(iter(kwargs.values()))).detach()),
        with_kwargs=True,
    )
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0].float()
    hook.remove()
    return logits, seen[-1].reshape(NUM_TOKENS, -1).float()


def _final_norm(model: Any) -> Any:
    base = getattr(model, "language_model", model)
    base = getattr(base, "model", None) or getattr(base, "backbone", None) or base
    base = getattr(base, "language_model", base)
    return next(getattr(base, name) for name in FINAL_NORMS if hasattr(base, name))


def _compare(logits: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    expected, other = torch.log_softmax(logits.double(), -1), torch.log_softmax(found.double(), -1)
    kl = (expected.exp() * (expected - other)).sum(-1).mean().item()
    return (logits.argmax(-1) == found.argmax(-1)).double().mean().item(), kl
