"""What is measured on a GPU, and the same in small to try the script on a machine without."""

from dataclasses import dataclass
from pathlib import Path

from eagle3_pipeline_tests.benchmarks.multi_gpu.sizes import TINY, DraftSize, Shape


@dataclass(frozen=True)
class Load:
    """Sequences of one mean length.

    Attributes:
        mean_tokens: mean length.
        num_sequences: how many are captured by this project.
        num_client: how many of them by the usual client; 0: not measured.
    """

    mean_tokens: int
    num_sequences: int
    num_client: int


@dataclass(frozen=True)
class Training:
    """A draft's training. Data of one epoch: every measured step is of it.

    Attributes:
        name: of the shape.
        draft: geometry and batch.
        shortest, longest: tokens of a sequence.
        every: steps between two of the lines of progress that speculators is asked for; as many steps at the start, and
            one, are not measured on either side.
        split_steps: of this project, measured part by part.
    """

    name: str
    draft: DraftSize
    shortest: int
    longest: int
    every: int
    split_steps: int

    @property
    def measured(self) -> tuple[int, int]:
        """Optimizer steps (the first is 1) at whose ends the clock is read."""
        return self.every + 1, (self.draft.steps - 1) // self.every * self.every + 1


@dataclass(frozen=True)
class Sizes:
    """All sizes of a run.

    Attributes:
        small: a verifier with random weights on disk.
        large: a verifier whose weights are made up at load.
        small_loads, large_loads: what is captured of each.
        num_compared: sequences that are compared with Transformers.
        num_prompts, prompt_tokens, new_tokens: what is generated.
        utilization, kvcache_gib: share of the GPU's memory, and cache, of each of the engines that share it.
        batch_tokens, batch_sequences: of one engine step.
        concurrency: of the usual client.
        chunks, chunks_at_once: into how many a load is cut, and how many are captured at the same time.
        memory_folder: a file system in the host's memory, if there is one.
        start_s: seconds that all engines are expected to take to start.
        trainings: drafts to train.
        train_start_s: seconds until a training takes its first step; what takes three times as long is ended.
    """

    small: Shape
    large: Shape
    small_loads: tuple[Load, ...]
    large_loads: tuple[Load, ...]
    num_compared: int
    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    utilization: float
    kvcache_gib: float
    batch_tokens: int
    batch_sequences: int
    concurrency: int
    chunks: int
    chunks_at_once: int
    memory_folder: Path
    start_s: float
    trainings: tuple[Training, ...]
    train_start_s: float


SMALL, LARGE = "135M shape", "8B shape"
_SMOLLM2 = Shape(576, 1536, 30, 9, 3, 64, 49152)
_8B = Shape(4096, 14336, 32, 32, 8, 128, 128256)
ON_GPU = Sizes(
    small=_SMOLLM2,
    large=_8B,
    small_loads=(Load(204, 12_000, 3_000), Load(2000, 1_000, 300)),
    large_loads=(Load(204, 2_000, 0), Load(2000, 300, 0)),
    num_compared=20,
    num_prompts=2048,
    prompt_tokens=64,
    new_tokens=256,
    utilization=0.14,
    kvcache_gib=12.0,
    batch_tokens=32_768,
    batch_sequences=1024,
    concurrency=128,
    chunks=8,
    chunks_at_once=3,
    memory_folder=Path("/dev/shm"),
    start_s=150.0,
    trainings=(
        # 6 GiB of states on each side.
        Training(LARGE, DraftSize(_8B, 32_000, 8192, 1, 23), 250, 1750, 5, 10),
        Training(SMALL, DraftSize(_SMOLLM2, 16_384, 8192, 1, 53), 250, 1750, 10, 10),
    ),
    train_start_s=80.0,
)
ON_CPU = Sizes(
    small=TINY,
    large=TINY,
    # vLLM's own connector copies on a CUDA stream.
    small_loads=(Load(48, 40, 0),),
    large_loads=(Load(48, 40, 0),),
    num_compared=4,
    num_prompts=8,
    prompt_tokens=16,
    new_tokens=8,
    utilization=0.1,
    kvcache_gib=1.0,
    batch_tokens=512,
    batch_sequences=16,
    concurrency=4,
    chunks=2,
    chunks_at_once=2,
    memory_folder=Path("/dev/shm"),
    start_s=60.0,
    trainings=(Training("tiny shape", DraftSize(TINY, 128, 256, 1, 12), 30, 60, 2, 3),),
    train_start_s=40.0,
)
