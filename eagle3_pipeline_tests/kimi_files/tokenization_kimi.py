"""The tokenizer that ships with the tiny Kimi: 256 bytes, then special tokens; Python code, so it is not a fast one."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

NUM_BYTES = 256


class TinyKimiTokenizer(PreTrainedTokenizer):
    """Token id = byte; `added_tokens_decoder` of tokenizer_config.json names the special ones."""

    vocab_files_names = {"vocab_file": "bytes.txt"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str | None = None, **kwargs: Any) -> None:
        self._vocab = {chr(byte): byte for byte in range(NUM_BYTES)}
        super().__init__(vocab_file=vocab_file, **kwargs)

    @property
    def vocab_size(self) -> int:
        return NUM_BYTES

    def get_vocab(self) -> dict[str, int]:
        return {**self._vocab, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [chr(byte) for byte in text.encode("utf-8")]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._vocab.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index) if index < NUM_BYTES else ""

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        text = b""
        for token in tokens:
            text += bytes([self._vocab[token]]) if token in self._vocab else token.encode("utf-8")
        return text.decode("utf-8", errors="replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        path = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}bytes.txt"
        path.write_text("bytes\n")
        return (str(path),)
