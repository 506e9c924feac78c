"""The verifier's chat template with a pipeline's settings, and the evaluation prompts as it renders them."""

from typing import Any

from eagle3_pipeline.data.chat_template import ChatTemplate, load_tokenizer
from eagle3_pipeline.data.verifier import generation_eos_ids
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.evaluation.prompts import load_prompts
from eagle3_pipeline.stages.context import StageContext


def chat_template(context: StageContext) -> ChatTemplate:
    """The verifier's template with this pipeline's settings.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or a setting has no effect on its template.
    """
    spec = context.spec
    tokenizer = load_tokenizer(context.verifier.path, spec.verifier.trust_remote_code)
    kwargs, stop_tokens = spec.generation.chat_template_kwargs, spec.verifier.stop_tokens
    stop_ids = generation_eos_ids(context.verifier.path)
    template = ChatTemplate(
        tokenizer,
        spec.verifier.chat_template,
        kwargs,
        stop_tokens,
        stop_ids,
        vocab_size=context.verifier.vocab_size,
        date=spec.generation.template_date,
        marks=spec.verifier.reasoning_marks,
    )
    template.check_arguments()
    return template


def prompt_rows(context: StageContext) -> dict[str, list[dict[str, Any]]]:
    """Evaluation prompts as token ids, by category: rows of sequence_id, input_ids.

    Raises:
        ConfigError: a prompt does not fit `generation.max_sequence_tokens`.
    """
    template, spec = chat_template(context), context.spec
    by_category: dict[str, list[dict[str, Any]]] = {}
    for prompt in load_prompts(spec.evaluation.prompts):
        text = template.render([{"role": "user", "content": prompt.prompt}], generation_prompt=True)
        tokens = template.encode(text)
        if len(tokens) + spec.evaluation.max_new_tokens > spec.generation.max_sequence_tokens:
            raise ConfigError(
                f"evaluation prompt {prompt.prompt[:60]!r}: {len(tokens)} + {spec.evaluation.max_new_tokens} tokens "
                f"exceed generation.max_sequence_tokens {spec.generation.max_sequence_tokens}"
            )
        by_category.setdefault(prompt.category, []).append({"sequence_id": prompt.identity, "input_ids": tokens})
    return by_category
