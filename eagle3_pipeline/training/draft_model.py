"""Builds the draft on speculators' `Eagle3DraftModel`, with the verifier's frozen weights and a reproducible start."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, PretrainedConfig

from eagle3_pipeline.errors import ConfigError, TrainingError
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.verifiers.ask import ask
from eagle3_pipeline.verifiers.formula import HeadFormula
from eagle3_pipeline.verifiers.head import FinalNorm, HeadWeights, OutputLayer, fold
from eagle3_pipeline.verifiers.tensors import Tensor, head_tensors

WEIGHTS_NAME = "model.safetensors"
_ATTENTION = {"flex_attention": "simple_flex_attention", "sdpa": "sdpa", "eager": "eager"}


@dataclass(frozen=True)
class VocabMap:
    """`t2d` bool [V] and `d2t` int64 [D] offsets: verifier id = i + d2t[i]."""

    t2d: torch.Tensor
    d2t: torch.Tensor

    @property
    def verifier_ids(self) -> torch.Tensor:
        """int64 [D]: the verifier's id of each draft token."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def draft_ids(self) -> torch.Tensor:
        """int64 [V]: the draft's id of each verifier token, -1 outside the draft vocabulary."""
        return torch.where(self.t2d, self.t2d.cumsum(0) - 1, -1)


@dataclass(frozen=True)
class VerifierWeights:
    """What training reads of the verifier.

    Attributes:
        embed_tokens: embeddings [V, H] in the stored type.
        lm_head: output layer [V, H] in the stored type.
        norm: float32 [H], gain of the final norm times the scale of the logits.
        norm_bias: float32 [H], times the same; `None`: none.
        head_bias: float32 [V]; `None`: none.
        formula: how logits are made of them.
    """

    embed_tokens: torch.Tensor
    lm_head: torch.Tensor
    norm: torch.Tensor
    norm_bias: torch.Tensor | None = None
    head_bias: torch.Tensor | None = None
    formula: HeadFormula = HeadFormula("rms", 0.0, 1e-6)

    def norm_module(self) -> FinalNorm:
        """The final norm, with the logits' scale."""
        return FinalNorm(self.formula, HeadWeights(self.lm_head, self.norm, self.norm_bias, self.head_bias))

    def output_layer(self, ids: torch.Tensor | None = None) -> OutputLayer:
        """The output layer; `ids`: of these tokens only, in this order."""
        rows = self.lm_head if ids is None else self.lm_head[ids]
        bias = self.head_bias if ids is None or self.head_bias is None else self.head_bias[ids]
        # Frozen weights are cast on every use if they are not in the compute type already.
        return OutputLayer(self.formula, rows if rows.dtype == torch.bfloat16 else rows.float(), bias)


def load_vocab_map(path: Path, vocab_size: int) -> VocabMap:
    """Reads and checks a vocabulary map.

    Raises:
        TrainingError: `t2d` and `d2t` do not fit each other or the verifier's vocabulary.
    """
    try:
        tensors = load_file(path)
        vocab_map = VocabMap(tensors["t2d"].bool(), tensors["d2t"].long())
    except (OSError, KeyError, SafetensorError) as error:
        raise TrainingError(f"{path} is not a vocabulary map with t2d and d2t: {error}") from error
    seen = torch.nonzero(vocab_map.t2d).flatten()
    if len(vocab_map.t2d) != vocab_size or not torch.equal(seen, vocab_map.verifier_ids):
        raise TrainingError(
            f"{path}: t2d of {len(vocab_map.t2d)} tokens with {len(seen)} set and d2t of {len(vocab_map.d2t)} do not "
            f"describe one map of the verifier's vocabulary of {vocab_size}; materialise vocab_map again"
        )
    return vocab_map


def load_verifier_weights(path: Path, verifier: PretrainedConfig) -> VerifierWeights:
    """Reads what makes the verifier's logits, and its embeddings, from whatever files hold them.

    Raises:
        TrainingError: a tensor is missing, quantised or of another shape, or the logits follow no known formula.
    """
    size = verifier.vocab_size
    try:
        asked = ask(path)
        if asked.formula is None:
            raise TrainingError(f"{path}: how this verifier makes logits is not known: {asked.formula_source}")
        found = head_tensors(path, asked)
        embedding, head = _read(found.embedding, size), None if found.head == found.embedding else found.head
        lm_head = embedding if head is None else _read(head, size)
        norm, norm_bias = (None if one is None else _read(one) for one in (found.norm, found.norm_bias))
        head_bias = None if found.head_bias is None else _read(found.head_bias, size)
    except (ConfigError, OSError, ValueError, SafetensorError) as error:
        raise TrainingError(f"the verifier's weights cannot be read: {error}") from error
    folded = fold(asked.formula, lm_head, norm, norm_bias, head_bias)
    return VerifierWeights(embedding, lm_head, folded.norm, folded.norm_bias, folded.head_bias, asked.formula)


def _read(tensor: Tensor, num_rows: int | None = None) -> torch.Tensor:
    with safe_open(tensor.file, framework="pt") as file:
        return file.get_slice(tensor.name)[:num_rows]


def build_draft(
    job: Job, layers: LlamaConfig, verifier: PretrainedConfig, weights: VerifierWeights, vocab_map: VocabMap
) -> Eagle3DraftModel:
    """An untrained draft on the CPU: float32 trainable parameters, the verifier's frozen weights in their own type.

    The output layer starts as the verifier's rows of the draft vocabulary; the rest is drawn from the seed.
    """
    torch.manual_seed(job.training.seed)
    layers._attn_implementation = _ATTENTION[resolve_attention(job)]
    model = Eagle3DraftModel(config=_speculator_config(job, layers, verifier, len(vocab_map.d2t)))
    model.load_vocab_mappings(vocab_map.t2d, vocab_map.d2t)
    model.float()
    rows = weights.lm_head[vocab_map.verifier_ids]
    with torch.no_grad():
        model.lm_head.weight.copy_(rows)
    frozen_parts = [(model.embed_tokens, weights.embed_tokens)]
    if not job.training.train_lm_head:
        frozen_parts.append((model.lm_head, rows))
    # Frozen weights are cast on every use if they are not in the compute type already.
    for module, value in frozen_parts:
        frozen = value if value.dtype == torch.bfloat16 else value.float()
        module.weight = torch.nn.Parameter(frozen.clone(), requires_grad=False)
    model.verifier_norm, model.verifier_lm_head = weights.norm_module(), weights.output_layer(vocab_map.verifier_ids)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_trained(name, job))
    return model


def _is_trained(name: str, job: Job) -> bool:
    if name == "lm_head.weight":
        return job.training.train_lm_head
    return not name.startswith(("embed_tokens.", "verifier_"))


def resolve_device(job: Job) -> torch.device:
    """Where the job runs.

    Raises:
        TrainingError: CUDA is asked for and not there.
    """
    wanted = job.training.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise TrainingError("training.device is cuda, but PyTorch sees no GPU")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # torchrun says which of the visible GPUs is this process's.
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def resolve_attention(job: Job) -> str:
    """The attention implementation by its name in the pipeline file."""
    if job.training.attention != "auto":
        return job.training.attention
    # To compile takes longer than a simulation does.
    return "flex_attention" if job.kind == "train" and resolve_device(job).type == "cuda" else "sdpa"


def _speculator_config(
    job: Job, layers: LlamaConfig, verifier: PretrainedConfig, draft_vocab_size: int
) -> Eagle3SpeculatorConfig:
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=job.draft.norm_before_residual,
        norm_before_fc=job.draft.norm_before_fc,
        fc_norm=False,
        norm_output=False,
        embed_requires_grad=False,
        eagle_aux_hidden_state_layer_ids=list(job.aux_layer_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=job.training.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=job.verifier_name, architectures=list(verifier.architectures or [])),
        ),
    )


def load_checkpoint(model: Eagle3DraftModel, folder: Path, vocab_map: VocabMap, remap: bool) -> int:
    """Loads a checkpoint's weights into a freshly built draft.

    Args:
        model: the draft, as `build_draft` made it.
        folder: a checkpoint folder.
        vocab_map: the vocabulary map that the draft was built with.
        remap: whether the checkpoint may have another draft vocabulary (a warm start): rows of the output layer then
            move by verifier id, and tokens that are new keep the verifier's row.

    Returns:
        How many rows of the output layer the checkpoint gave.

    Raises:
        TrainingError: a tensor is missing, unknown, or of another shape, or the vocabulary differs without `remap`.
    """
    path = folder / WEIGHTS_NAME
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            saved = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"the checkpoint {path} cannot be read: {error}") from error
    own = {n: v for n, v in model.state_dict().items() if not n.startswith("verifier_")}
    saved_ids = _verifier_ids(saved, vocab_map, path)
    if not torch.equal(saved_ids, vocab_map.verifier_ids):
        if not remap:
            raise TrainingError(f"{path} has another draft vocabulary than the vocabulary map")
        saved["lm_head.weight"] = _remap_rows(model.lm_head.weight, saved["lm_head.weight"], saved_ids, vocab_map)
    for name in ("t2d", "d2t"):
        saved.pop(name, None)
        own.pop(name, None)
    shapes, expected = ({n: list(v.shape) for n, v in tensors.items()} for tensors in (saved, own))
    if shapes != expected:
        names = sorted(n for n in shapes.keys() | expected.keys() if shapes.get(n) != expected.get(n))
        detail = "; ".join(f"{n}: {shapes.get(n, 'missing')}, expected {expected.get(n, 'none')}" for n in names[:5])
        raise TrainingError(f"{path} does not fit this draft's geometry: {detail}")
    model.load_state_dict(saved, strict=False)
    return int(vocab_map.t2d[saved_ids].sum())


def _verifier_ids(saved: dict[str, torch.Tensor], vocab_map: VocabMap, path: Path) -> torch.Tensor:
    """int64 [D of the checkpoint]: verifier ids; a checkpoint of the full vocabulary has no map."""
    if "lm_head.weight" not in saved:
        raise TrainingError(f"{path} has no lm_head.weight: it is not a draft checkpoint")
    ids = torch.arange(len(saved["lm_head.weight"])) + saved.get("d2t", torch.tensor(0))
    if len(ids) == 0 or int(ids.max()) >= len(vocab_map.t2d):
        raise TrainingError(f"{path}: its d2t leaves the verifier's vocabulary of {len(vocab_map.t2d)}")
    return ids


def _remap_rows(fresh: torch.Tensor, saved: torch.Tensor, saved_ids: torch.Tensor, vocab_map: VocabMap) -> torch.Tensor:
    rows = fresh.detach().clone()  # [D, H]
    targets = vocab_map.draft_ids[saved_ids]
    known = targets >= 0
    rows[targets[known]] = saved[known].to(rows.dtype)
    return rows
