"""Training sequences: golden masks per template family, sampled ids kept as they are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.config import GenerationSpec
from eagle3_pipeline.data.chat_template import ChatTemplate
from eagle3_pipeline.data.sequences import (
    Prompt,
    RejectedTurn,
    Sequence,
    count_supervised,
    make_prompts,
    passthrough_sequences,
    sequence_from_answer,
    sequence_id,
)
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline_tests.data.templates import (
    CHATML,
    KIMI,
    LLAMA3,
    SPECIAL,
    byte_tokenizer,
    chat_template,
    turns,
    word_tokenizer,
)

SPEC = GenerationSpec(mode="passthrough", max_new_tokens=8, max_sequence_tokens=64)
TOKENIZER = word_tokenizer()


def _golden(sequence: Sequence | RejectedTurn) -> str:
    """Tokens as written, supervised ones between « and »."""
    assert isinstance(sequence, Sequence)
    assert len(sequence.input_ids) == len(sequence.loss_mask)
    text, inside = "", False
    for token, supervised in zip(sequence.input_ids, sequence.loss_mask, strict=True):
        if supervised != inside:
            text += "«" if supervised else "»"
            inside = supervised
        text += TOKENIZER.convert_ids_to_tokens(token)
    return text + ("»" if inside else "")


# --- passthrough ------------------------------------------------------------------------------------------------------


def test_chatml_trains_on_both_answers_with_their_end_markers_but_not_the_line_break() -> None:
    messages = turns("hi there", "fine thanks", "bye", "see you", system="be nice")
    (sequence,) = passthrough_sequences("c", messages, chat_template(CHATML), SPEC)
    assert _golden(sequence) == (
        "<|im_start|>system\nbe nice<|im_end|>\n"
        "<|im_start|>user\nhi there<|im_end|>\n"
        "<|im_start|>assistant\n«fine thanks<|im_end|>»\n"
        "<|im_start|>user\nbye<|im_end|>\n"
        "<|im_start|>assistant\n«see you<|im_end|>»\n"
    )
    assert isinstance(sequence, Sequence)
    # The prompt: 8 tokens of the system's turn, 8 of the user's, 3 that open the answer.
    assert (sequence.num_prompt_tokens, sequence.turn, sequence.finish_reason) == (8 + 8 + 3, 4, "data")
    assert sequence.text == "see you<|im_end|>\n" and sequence.reasoning == ""


def test_llama3_trains_on_the_answers_up_to_eot() -> None:
    (sequence,) = passthrough_sequences("c", turns("hi", "fine thanks", "bye", "see you"), chat_template(LLAMA3), SPEC)
    assert _golden(sequence) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«fine thanks<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nbye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«see you<|eot_id|>»"
    )


def test_a_template_that_blanks_past_reasoning_gives_a_sequence_per_answer() -> None:
    messages = turns("q one", "<think>r one</think>a one", "q two", "<think>r two</think>a two")
    first, second = passthrough_sequences("c", messages, chat_template(KIMI), SPEC)
    assert _golden(first) == (
        "<|im_user|>user<|im_middle|>q one<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>«r one</think>a one<|im_end|>»"
    )
    assert _golden(second) == (
        "<|im_user|>user<|im_middle|>q one<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>a one<|im_end|>"
        "<|im_user|>user<|im_middle|>q two<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>«r two</think>a two<|im_end|>»"
    )
    assert isinstance(first, Sequence) and isinstance(second, Sequence)
    assert (first.reasoning, first.text) == ("r one</think>", "a one<|im_end|>")
    assert (first.turn, second.turn) == (1, 3)
    assert first.sequence_id != second.sequence_id and first.conversation_id == second.conversation_id == "c"


def test_in_thinking_mode_an_answer_without_reasoning_closes_it_first() -> None:
    (sequence,) = passthrough_sequences("c", turns("q one", "a one"), chat_template(KIMI), SPEC)
    assert _golden(sequence) == (
        "<|im_user|>user<|im_middle|>q one<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>«</think>a one<|im_end|>»"
    )


def test_the_same_template_without_thinking_gives_one_sequence() -> None:
    messages = turns("q one", "a one", "q two", "a two")
    (sequence,) = passthrough_sequences("c", messages, chat_template(KIMI, thinking=False), SPEC)
    assert _golden(sequence) == (
        "<|im_user|>user<|im_middle|>q one<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>«a one<|im_end|>»"
        "<|im_user|>user<|im_middle|>q two<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>«a two<|im_end|>»"
    )


def test_an_answer_that_does_not_continue_its_generation_prompt_is_rejected_alone() -> None:
    # With thinking off the prompt ends in </think>, which an answer with reasoning does not start with.
    messages = turns("q one", "a one", "q two", "<think>r two</think>a two")
    first, second = passthrough_sequences("c", messages, chat_template(KIMI, thinking=False), SPEC)
    assert _golden(first).endswith("<think></think>«a one<|im_end|>»")
    assert isinstance(second, RejectedTurn)
    assert (second.turn, second.rejection.reason) == (3, "template_mismatch")
    assert second.row()["detail"] == "the rendered answer does not start with its generation prompt"


def test_words_behind_the_last_answer_are_left_out() -> None:
    (sequence,) = passthrough_sequences("c", turns("hi", "fine", "bye"), chat_template(CHATML), SPEC)
    assert _golden(sequence) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«fine<|im_end|>»\n"


def test_a_conversation_without_answers_is_rejected() -> None:
    (rejected,) = passthrough_sequences("c", turns("hi"), chat_template(CHATML), SPEC)
    assert isinstance(rejected, RejectedTurn) and rejected.rejection.reason == "no_assistant_turn"


def test_a_conversation_that_is_too_long_is_rejected_with_numbers() -> None:
    # <|im_start|> user \n hi <|im_end|> \n: 6 tokens; the answer too.
    messages = turns("hi", "fine")
    fits = SPEC.model_copy(update={"max_sequence_tokens": 12})
    tight = SPEC.model_copy(update={"max_sequence_tokens": 11})
    assert isinstance(passthrough_sequences("c", messages, chat_template(CHATML), fits)[0], Sequence)
    (rejected,) = passthrough_sequences("c", messages, chat_template(CHATML), tight)
    assert isinstance(rejected, RejectedTurn)
    assert (rejected.rejection.reason, rejected.rejection.detail) == ("too_long", "12 tokens > 11")


def test_a_template_that_writes_no_answer_has_no_supervised_tokens() -> None:
    silent = "{% for m in messages %}{% if m.role == 'user' %}user{{ m.content }}{% endif %}{% endfor %}"
    (rejected,) = passthrough_sequences("c", turns("hi", "fine"), chat_template(silent), SPEC)
    assert isinstance(rejected, RejectedTurn) and rejected.rejection.reason == "no_supervised_tokens"


def test_history_is_free_of_reasoning_where_the_template_would_keep_it() -> None:
    messages = turns("q one", "<think>r one</think> a one", "q two", "<think>r two</think>a two")
    first, second = passthrough_sequences("c", messages, chat_template(CHATML), SPEC)
    assert _golden(first).endswith("assistant\n«<think>r one</think> a one<|im_end|>»\n")
    assert _golden(second) == (
        "<|im_start|>user\nq one<|im_end|>\n<|im_start|>assistant\na one<|im_end|>\n"
        "<|im_start|>user\nq two<|im_end|>\n<|im_start|>assistant\n«<think>r two</think>a two<|im_end|>»\n"
    )


class SlowTokenizer:
    """A tokenizer that is Python code, as Kimi's: it knows no offsets."""

    is_fast = False

    def __init__(self, merge: str = "") -> None:
        self._fast = word_tokenizer()
        self._merge = merge

    def __call__(self, text: str, add_special_tokens: bool) -> dict:
        ids = self._fast(text, add_special_tokens=add_special_tokens)["input_ids"]
        return {"input_ids": [-1] if self._merge and self._merge in text else ids}

    def __getattr__(self, name: str):
        return getattr(self._fast, name)


@pytest.mark.parametrize("family", [CHATML, LLAMA3, KIMI])
def test_masks_do_not_need_a_fast_tokenizer(family: str) -> None:
    for messages in (
        turns("hi there", "fine thanks", "bye", "see you", system="be nice"),
        turns("q one", "<think>r one</think>a one", "q two", "<think>r two</think>a two"),
    ):
        slow, fast = (
            chat_template(family, tokenizer, ["<|im_end|>", "<|eot_id|>"], thinking=True)
            for tokenizer in (SlowTokenizer(), None)
        )
        assert passthrough_sequences("c", messages, slow, SPEC) == passthrough_sequences("c", messages, fast, SPEC)


def test_a_token_across_the_start_of_an_answer_rejects_the_turn() -> None:
    # What is one token in the whole text is two in its parts.
    template = chat_template(CHATML, SlowTokenizer(merge="assistant\nfine"))
    (rejected,) = passthrough_sequences("c", turns("hi", "fine"), template, SPEC)
    assert isinstance(rejected, RejectedTurn) and rejected.rejection.reason == "template_mismatch"
    assert "joins the end of an answer, or its beginning" in rejected.rejection.detail


CONTENT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: not any(special in text for special in SPECIAL)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(CONTENT, min_size=2, max_size=6), st.sampled_from([CHATML, LLAMA3, KIMI]))
def test_exactly_the_bytes_of_answers_are_supervised(contents: list[str], family: str) -> None:
    template = chat_template(family, byte_tokenizer(), thinking=False)
    spec = GenerationSpec(mode="passthrough", max_new_tokens=8, max_sequence_tokens=4096)
    (sequence,) = passthrough_sequences("c", turns(*contents), template, spec)
    assert isinstance(sequence, Sequence)
    assert len(sequence.input_ids) == len(sequence.loss_mask)
    answers = [content.strip() if family == LLAMA3 else content for content in contents[1::2]]
    end = template.stop_token_ids[0]
    supervised = [t for t, m in zip(sequence.input_ids, sequence.loss_mask, strict=True) if m]
    expected = [[*byte_tokenizer()(answer, add_special_tokens=False)["input_ids"], end] for answer in answers]
    assert supervised == [token for answer in expected for token in answer]
    assert [len(answer.encode()) + 1 for answer in answers] == [len(answer) for answer in expected]


# --- regenerate -------------------------------------------------------------------------------------------------------


def test_every_user_turn_is_a_prompt_with_its_history() -> None:
    messages = turns("hi there", "fine thanks", "bye", "see you", system="be nice")
    first, second = make_prompts("c", messages, chat_template(CHATML), SPEC)
    assert isinstance(first, Prompt) and isinstance(second, Prompt)
    opening = "<|im_start|>system\nbe nice<|im_end|>\n<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
    assert "".join(TOKENIZER.convert_ids_to_tokens(first.input_ids)) == opening
    assert "".join(TOKENIZER.convert_ids_to_tokens(second.input_ids)) == (
        opening + "fine thanks<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (first.turn, second.turn) == (1, 3)
    assert first.sequence_id == sequence_id("c", 1) != second.sequence_id


@pytest.mark.parametrize(("thinking", "opening"), [(True, "<think>"), (False, "<think></think>")])
def test_kimi_prompts_open_the_answer_as_the_mode_does_and_history_has_no_reasoning(
    thinking: bool, opening: str
) -> None:
    messages = turns("q one", "<think>r one</think>a one", "q two", system="be nice")
    first, second = make_prompts("c", messages, chat_template(KIMI, thinking=thinking), SPEC)
    assert isinstance(first, Prompt) and isinstance(second, Prompt)
    start = "<|im_system|>system<|im_middle|>be nice<|im_end|><|im_user|>user<|im_middle|>q one<|im_end|>"
    answer = "<|im_assistant|>assistant<|im_middle|>"
    assert "".join(TOKENIZER.convert_ids_to_tokens(first.input_ids)) == start + answer + opening
    assert "".join(TOKENIZER.convert_ids_to_tokens(second.input_ids)) == (
        start + answer + "<think></think>a one<|im_end|><|im_user|>user<|im_middle|>q two<|im_end|>" + answer + opening
    )


def test_a_plain_template_gets_history_without_reasoning() -> None:
    messages = turns("q one", "<think>r one</think>\n\na one", "q two")
    _, second = make_prompts("c", messages, chat_template(CHATML), SPEC)
    assert isinstance(second, Prompt)
    assert "assistant\na one<|im_end|>" in "".join(TOKENIZER.convert_ids_to_tokens(second.input_ids))


def test_sampled_reasoning_is_trained_on_although_the_template_blanks_it() -> None:
    template = chat_template(KIMI)
    (prompt,) = make_prompts("c", turns("q one"), template, SPEC)
    assert isinstance(prompt, Prompt)
    sampled = TOKENIZER.convert_tokens_to_ids(["r", " ", "one", "</think>", "a", "<|im_end|>"])
    found = sequence_from_answer(prompt, _answer(sampled), template, SPEC)
    assert _golden(found) == (
        "<|im_user|>user<|im_middle|>q one<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
        "«r one</think>a<|im_end|>»"
    )
    # A conversation that goes on renders the same answer without its reasoning: templating it loses what is trained.
    talk = turns("q one", "<think>r one</think>a", "q two")
    assert "<think></think>a<|im_end|>" in template.render(talk, generation_prompt=True)


def test_a_prompt_without_room_for_an_answer_is_rejected_with_numbers() -> None:
    # 6 tokens of the turn, 3 that open the answer, 8 new ones.
    spec = SPEC.model_copy(update={"max_sequence_tokens": 17})
    assert isinstance(make_prompts("c", turns("hi"), chat_template(CHATML), spec)[0], Prompt)
    spec = SPEC.model_copy(update={"max_sequence_tokens": 16})
    (rejected,) = make_prompts("c", turns("hi"), chat_template(CHATML), spec)
    assert isinstance(rejected, RejectedTurn)
    assert (rejected.rejection.reason, rejected.rejection.detail) == ("too_long", "9 prompt tokens + 8 new > 16")


PROMPT = Prompt("s", "c", 1, [7, 8, 9])


def _answer(tokens: list[int], reason: str = "stop", logprob: float | None = None) -> dict:
    return {"token_ids": tokens, "finish_reason": reason, "cumulative_logprob": logprob}


def test_sampled_ids_are_kept_verbatim() -> None:
    ids = TOKENIZER.convert_tokens_to_ids
    # Tokenising the text of these again would give other ids: <unk> has no text, two spaces in a row none of ours.
    sampled = [ids("<unk>"), ids("<think>"), ids(" "), ids(" "), ids("one"), ids("one"), ids("<|im_end|>")]
    found = sequence_from_answer(PROMPT, _answer(sampled, logprob=-3.5), chat_template(CHATML), SPEC)
    assert isinstance(found, Sequence)
    assert found.input_ids == [7, 8, 9, *sampled]
    assert found.loss_mask == [False] * 3 + [True] * 7
    assert (found.num_prompt_tokens, found.mean_logprob) == (3, -0.5)
    assert found.text == "<unk><think>  oneone<|im_end|>"


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(CONTENT, min_size=1, max_size=6),
    system=st.none() | CONTENT,
    family=st.sampled_from([CHATML, LLAMA3, KIMI]),
    thinking=st.booleans(),
    sampled=st.lists(st.integers(0, 300), min_size=1, max_size=20),
)
def test_any_conversation_keeps_sampled_ids_and_supervises_nothing_else(
    contents: list[str], system: str | None, family: str, thinking: bool, sampled: list[int]
) -> None:
    template = chat_template(family, byte_tokenizer(), thinking=thinking)
    spec = GenerationSpec(max_new_tokens=20, max_sequence_tokens=4096)
    prompts = make_prompts("c", turns(*contents, system=system or ""), template, spec)
    assert len(prompts) == (len(contents) + 1) // 2
    for prompt in prompts:
        assert isinstance(prompt, Prompt)
        found = sequence_from_answer(prompt, _answer(sampled), template, spec)
        assert isinstance(found, Sequence)
        assert len(found.input_ids) == len(found.loss_mask) == len(prompt.input_ids) + len(sampled)
        supervised = [i for i, m in enumerate(found.loss_mask) if m]
        assert supervised == list(range(len(prompt.input_ids), len(found.input_ids)))
        assert [found.input_ids[i] for i in supervised] == sampled


def test_reasoning_is_told_apart_in_the_text_only() -> None:
    sampled = TOKENIZER.convert_tokens_to_ids(["r", " ", "one", "</think>", "a", "<|im_end|>"])
    found = sequence_from_answer(PROMPT, _answer(sampled), chat_template(KIMI), SPEC)
    assert isinstance(found, Sequence)
    assert (found.reasoning, found.text) == ("r one</think>", "a<|im_end|>")
    assert found.loss_mask == [False] * 3 + [True] * 6 and found.mean_logprob is None


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_that_was_cut_while_thinking_is_reasoning_only(thinking: bool) -> None:
    template = chat_template(KIMI, thinking=thinking)
    (prompt,) = make_prompts("c", turns("q one"), template, SPEC)
    assert isinstance(prompt, Prompt)
    found = sequence_from_answer(
        prompt, _answer(TOKENIZER.convert_tokens_to_ids(["r", " ", "one"]), "length"), template, SPEC
    )
    assert isinstance(found, Sequence)
    assert (found.reasoning, found.text) == (("r one", "") if thinking else ("", "r one"))


def test_an_answer_of_reasoning_only_is_kept() -> None:
    sampled = TOKENIZER.convert_tokens_to_ids(["r", "</think>"])
    found = sequence_from_answer(PROMPT, _answer(sampled), chat_template(KIMI), SPEC)
    assert isinstance(found, Sequence) and (found.reasoning, found.text) == ("r</think>", "")


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_truncated_answers_are_kept_or_dropped(policy: str) -> None:
    spec = SPEC.model_copy(update={"truncated": policy})
    found = sequence_from_answer(PROMPT, _answer([1, 2], "length"), chat_template(CHATML), spec)
    if policy == "keep":
        assert isinstance(found, Sequence) and found.finish_reason == "length"
    else:
        assert isinstance(found, RejectedTurn)
        assert (found.rejection.reason, found.rejection.detail) == ("truncated_generation", "cut at 2 tokens")
    assert isinstance(sequence_from_answer(PROMPT, _answer([1, 2]), chat_template(CHATML), spec), Sequence)


def test_an_empty_answer_is_rejected() -> None:
    found = sequence_from_answer(PROMPT, _answer([]), chat_template(CHATML), SPEC)
    assert isinstance(found, RejectedTurn) and found.rejection.reason == "no_supervised_tokens"
    assert (found.conversation_id, found.turn) == ("c", 1)


def test_supervised_tokens_are_counted() -> None:
    one = Sequence("s", "c", 1, [5, 5, 6, 7], [False, True, True, False], 1, "", "", "stop")
    two = Sequence("t", "c", 3, [5, 6], [True, True], 0, "", "", "stop")
    assert count_supervised([one, two]) == {5: 2, 6: 2}


# --- the template -----------------------------------------------------------------------------------------------------


def test_stop_tokens_are_eos_and_the_configured_ones() -> None:
    eos, think = TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "</think>"])
    assert chat_template(CHATML, stop=["</think>"]).stop_token_ids == sorted([eos, think])


@pytest.mark.parametrize("tokenizer", [word_tokenizer, byte_tokenizer], ids=["unk", "no unk"])
def test_a_stop_token_that_is_none_is_refused(tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"verifier\.stop_tokens: '<\|end\|>' is not a token"):
        chat_template(CHATML, tokenizer(), stop=["<|end|>"])


PICKY = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML


def test_a_conversation_that_the_template_refuses_is_rejected_alone() -> None:
    template = chat_template(PICKY)
    with_system, without = turns("hi", "fine", system="be nice"), turns("hi", "fine")
    for found in (
        make_prompts("c", with_system, template, SPEC),
        passthrough_sequences("c", with_system, template, SPEC),
    ):
        (rejected,) = found
        assert isinstance(rejected, RejectedTurn)
        assert rejected.rejection.reason == "template_refused" and "no system" in rejected.rejection.detail
    assert isinstance(make_prompts("c", without, template, SPEC)[0], Prompt)
    assert isinstance(passthrough_sequences("c", without, template, SPEC)[0], Sequence)


def test_a_template_whose_answers_end_on_no_stop_token_is_known() -> None:
    assert chat_template(CHATML).unstopped_end() is None
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "<|eot_id|>"
    unstopped = ChatTemplate(tokenizer, CHATML, {}, [])
    assert unstopped.unstopped_end() == "<|im_end|>\n"
    assert ChatTemplate(tokenizer, CHATML, {}, ["<|im_end|>"]).unstopped_end() is None
    ids = [TOKENIZER.convert_tokens_to_ids("<|im_end|>")]
    assert ChatTemplate(tokenizer, CHATML, {}, [], ids).unstopped_end() is None
    # A template that marks no end says nothing about it.
    plain = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert ChatTemplate(tokenizer, plain, {}, []).unstopped_end() is None


def test_a_template_that_refuses_a_conversation_is_a_config_error() -> None:
    template = chat_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="refused a conversation of 1 turns: roles must alternate"):
        template.render(turns("hi"), generation_prompt=True)


def test_a_tokenizer_without_template_is_a_config_error() -> None:
    template = ChatTemplate(word_tokenizer(), None, {}, [])
    with pytest.raises(ConfigError, match="chat template refused"):
        template.render(turns("hi"), generation_prompt=True)
