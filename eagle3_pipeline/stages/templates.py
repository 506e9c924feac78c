"""The verifier's chat template with a pipeline's settings, and the evaluation prompts as it renders them."""

from collections.abc import Mapping
from typing import Any

from eagle3_pipeline.data.chat_template import ChatTemplate, load_tokenizer
from eagle3_pipeline.data.reasoning import split_reasoning
from eagle3_pipeline.data.verifier import generation_eos_ids
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.evaluation.prompts import EvaluationPrompt, load_prompts
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.store.fingerprint import digest

# A marker that is no token of its own takes a few.
_OPENING_TOKENS = 16


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


Rows = dict[str, list[dict[str, Any]]]


def prompt_rows(context: StageContext) -> Rows:
    """Evaluation prompts as token ids, by category: rows of sequence_id, input_ids; of chats the first question.

    Raises:
        ConfigError: a prompt does not fit `generation.max_sequence_tokens`, or holds an id outside the vocabulary.
    """
    template, spec = chat_template(context), context.spec
    for prompt in load_prompts(spec.evaluation.prompts):
        if len(_questions(prompt)) > 1:
            # Its later turns are told now, before any engine starts, with answers as long as they may be.
            asked = _asked(prompt, len(_questions(prompt)) - 1, dict.fromkeys(range(len(prompt.messages)), "x"))
            _check_prompt(context, template, prompt, asked, len(_questions(prompt)))
    return question_rows(context, 0, {})


def question_rows(context: StageContext, number: int, answers: Mapping[str, str]) -> Rows:
    """Question `number` (from 0) of every evaluation prompt that has so many, as `prompt_rows`.

    Args:
        context: the pipeline.
        number: which of a chat's turns that the verifier answers.
        answers: its answers so far, by sequence id, as `answer_text` shows them to later turns.

    Raises:
        ConfigError: as `prompt_rows`.
    """
    template = chat_template(context)
    by_category: Rows = {}
    for prompt in load_prompts(context.spec.evaluation.prompts):
        if number < len(_questions(prompt)):
            own = {k: answers[question_id(prompt, k)] for k in range(number)}
            tokens = _check_prompt(context, template, prompt, _asked(prompt, number, own), 1)
            row = {"sequence_id": question_id(prompt, number), "input_ids": tokens}
            by_category.setdefault(prompt.category, []).append(row)
    return by_category


def question_id(prompt: EvaluationPrompt, number: int) -> str:
    """Identity of a prompt's question; of the first one it is the prompt's."""
    return digest([prompt.identity, number]) if number else prompt.identity


def answer_text(template: ChatTemplate, prompt_ids: list[int], sampled: list[int]) -> str:
    """An answer as later turns of its chat show it: without stop token and reasoning."""
    ends = next((i for i, token in enumerate(sampled) if token in template.stop_token_ids), len(sampled))
    is_thinking = template.is_thinking(template.decode(prompt_ids[-_OPENING_TOKENS:]))
    return split_reasoning(template.decode(sampled[:ends]), [template.marks], is_thinking)[1].strip()


def _questions(prompt: EvaluationPrompt) -> list[int]:
    """Positions of the user turns that have no answer."""
    roles = [role for role, _ in prompt.messages] or ["user"]
    return [i for i, role in enumerate(roles) if role == "user" and roles[i + 1 : i + 2] != ["assistant"]]


def _asked(prompt: EvaluationPrompt, number: int, own: Mapping[int, str]) -> list[dict[str, str]]:
    """The messages up to question `number`, each earlier question with the verifier's own answer."""
    questions, found = _questions(prompt), []
    for position, (role, text) in enumerate(prompt.messages or (("user", prompt.prompt),)):
        found.append({"role": role, "content": text})
        if position == questions[number]:
            break
        if position in questions:
            found.append({"role": "assistant", "content": own[questions.index(position)]})
    return found


def _check_prompt(
    context: StageContext,
    template: ChatTemplate,
    prompt: EvaluationPrompt,
    messages: list[dict[str, str]],
    num_answers: int,
) -> list[int]:
    """Token ids of a prompt that fits with `num_answers` answers."""
    spec = context.spec
    tokens = template.encode(template.render(messages, generation_prompt=True))
    where = f"evaluation prompt {prompt.prompt[:60]!r} ({prompt.category})"
    if outside := template.outside_vocabulary(tokens):
        raise ConfigError(f"{where} holds {outside}; take it out of evaluation.prompts")
    new = num_answers * spec.evaluation.max_new_tokens
    if len(tokens) + new > spec.generation.max_sequence_tokens:
        raise ConfigError(
            f"{where}: {len(tokens)} + {new} tokens exceed generation.max_sequence_tokens "
            f"{spec.generation.max_sequence_tokens}"
        )
    return tokens
