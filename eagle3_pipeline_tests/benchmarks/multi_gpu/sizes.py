"""What is measured on GPUs, and the same in small to try the script on a machine without."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def block_parameters(self) -> int:
        """Weights of all layers: what a prefilled token is multiplied with."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)


@dataclass(frozen=True)
class DraftSize:
    """A draft's training: which verifier, and how much data."""

    verifier: Shape
    draft_vocab: int
    batch_tokens: int
    batches_a_rank: int
    steps: int

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """vLLM's default choice."""
        n = self.verifier.layers
        return (2, n // 2, n - 3)


@dataclass(frozen=True)
class Sizes:
    """All sizes of a run.

    Attributes:
        verifier: served with random weights.
        layer_ids: captured; every one has a neighbour among them.
        sequence_tokens: mean length.
        num_compared: sequences of the comparison between engines.
        num_measured: sequences of one engine's speed.
        kimi_dtype: of the model with experts: GPU kernels of latent attention take bfloat16 only.
        disk_bytes: written to measure the disk.
        utilization: share of a GPU's memory for vLLM.
        shared_utilization, shared_kvcache_gib: the same, and the cache, of engines that share a GPU.
        start_s: seconds that an engine's start is expected to take.
        tolerance: largest relative difference of a layer between two engines (bf16).
        neighbour: least relative difference of neighbouring layers.
        draft: trained on one process and on all.
        small_draft: killed and resumed.
        large_draft: of the largest verifier; two steps.
        train_s: seconds that a training of `draft` is expected to take.
    """

    verifier: Shape
    layer_ids: tuple[int, ...]
    sequence_tokens: int
    num_compared: int
    num_measured: int
    disk_bytes: int
    kimi_dtype: str
    utilization: float
    shared_utilization: float
    shared_kvcache_gib: float
    start_s: float
    tolerance: float
    neighbour: float
    draft: DraftSize
    small_draft: DraftSize
    large_draft: DraftSize
    train_s: float


_8B = Shape(4096, 14336, 32, 32, 8, 128, 128256)
_KIMI = Shape(7168, 18432, 61, 64, 64, 128, 163840)
TINY = Shape(128, 256, 8, 8, 8, 64, 320)
_SMALL = DraftSize(TINY, 128, 256, 2, 8)
# So many steps that a kill after the first one finds it at work.
_KILLED = replace(_SMALL, steps=40)

ON_GPU = Sizes(
    verifier=_8B,
    layer_ids=(2, 3, 31, 32),
    sequence_tokens=1000,
    num_compared=50,
    num_measured=192,
    disk_bytes=2**30,
    kimi_dtype="bfloat16",
    utilization=0.7,
    shared_utilization=0.15,
    shared_kvcache_gib=16.0,
    start_s=110.0,
    tolerance=0.06,
    neighbour=0.1,
    draft=DraftSize(_8B, 32000, 4096, 2, 16),
    small_draft=_KILLED,
    large_draft=DraftSize(_KIMI, 32000, 4096, 1, 2),
    train_s=90.0,
)
ON_CPU = Sizes(
    verifier=TINY,
    layer_ids=(2, 3, 7, 8),
    sequence_tokens=48,
    num_compared=6,
    num_measured=12,
    disk_bytes=2**26,
    kimi_dtype="float32",
    utilization=0.1,
    shared_utilization=0.1,
    shared_kvcache_gib=1.0,
    start_s=60.0,
    tolerance=0.06,
    neighbour=0.1,
    draft=_SMALL,
    small_draft=_KILLED,
    large_draft=DraftSize(TINY, 128, 256, 1, 2),
    train_s=30.0,
)
