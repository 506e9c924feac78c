"""A process that materialises a chunk and can be held at gates: `python -m eagle3_pipeline_tests.resume.gated CHUNK`.

Beside the fake engine's gates there is one before each publication: `publish-STAGE`.
"""

import functools
import sys
from pathlib import Path
from typing import Any

from eagle3_pipeline.config import find_pipeline
from eagle3_pipeline.stages import templates
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.verifier_outputs import materialise_outputs
from eagle3_pipeline.store.manifest import Manifest
from eagle3_pipeline.store.objects import Artifact, ArtifactWriter
from eagle3_pipeline_tests.fake_engine import wait_at_gate

PIPELINE = "killed"


@functools.cache
def light_tokenizer(path: str, _trust_remote_code: bool) -> Any:
    """What `AutoTokenizer` makes of the tiny model's folder; importing that one imports torch, which takes seconds."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(Path(path))


def install() -> None:
    """Puts the gates and the light tokenizer into this process."""
    publish = ArtifactWriter.publish

    def gated(writer: ArtifactWriter, manifest: Manifest, *checksums: Any) -> Artifact:
        wait_at_gate(f"publish-{manifest.stage}")
        return publish(writer, manifest, *checksums)

    ArtifactWriter.publish = gated  # type: ignore[assignment, method-assign]
    templates.load_tokenizer = light_tokenizer  # type: ignore[assignment]


def main() -> None:
    """Materialises both outputs of the chunk that the command line names."""
    install()
    materialise_outputs(StageContext(find_pipeline(PIPELINE)), sys.argv[1])


if __name__ == "__main__":
    main()
