"""Chat templates of three families, and a tokenizer whose tokens are words, spaces and line breaks."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3_pipeline.data.chat_template import ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Reasoning is kept in the last message only; an answer without reasoning gets an empty one.
KIMI = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'assistant' and not (loop.last and '</think>' in m.content) %}"
    "<think></think>{{ m.content.split('</think>') | last }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>"
    "<think>{% if thinking is defined and not thinking %}</think>{% endif %}{% endif %}"
)
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<think>",
    "</think>",
]
_TEXT = "system user assistant be nice hi there fine thanks bye see you q r a one two three"
WORDS = [*_TEXT.split(), "\n", " "]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words of `WORDS`, a space, a line break and special tokens are a token each; other words are `<unk>`."""
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["<unk>", *SPECIAL, *WORDS]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n| |[^\s]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, as in a byte-level BPE without merges; special tokens are one each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def chat_template(template: str, tokenizer: Any = None, stop: Iterable[str] = (), **kwargs: Any) -> ChatTemplate:
    """A template over the word tokenizer that ends turns on the family's own marker."""
    end = "<|eot_id|>" if template == LLAMA3 else "<|im_end|>"
    tokenizer = tokenizer or word_tokenizer()
    tokenizer.eos_token = end
    return ChatTemplate(tokenizer, template, kwargs, list(stop))


def turns(*contents: str, system: str = "") -> list[dict[str, str]]:
    """Messages: user, assistant, user, ..."""
    found = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *found] if system else found
