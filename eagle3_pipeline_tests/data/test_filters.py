"""Filters by source, language and length; decontamination."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.data.conversations import normalise
from eagle3_pipeline.data.decontamination import Decontamination
from eagle3_pipeline.data.filters import check_language
from eagle3_pipeline.data.rejection import Rejection
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline_tests.data.test_row_formats import spec, talk


def reason(row: dict, **filters: Any) -> str:
    found = normalise(row, spec(filters=filters))
    return found.reason if isinstance(found, Rejection) else ""


def test_sources_are_chosen_or_excluded() -> None:
    row = {"prompt": "p", "source": "math"}
    assert reason(row) == reason(row, sources=["code", "math"]) == reason(row, exclude_sources=["code"]) == ""
    assert reason(row, sources=["code"]) == reason(row, exclude_sources=["math"]) == "filtered_source"
    # A row that does not say where it comes from is none of those that are asked for.
    assert reason({"prompt": "p"}, sources=["math"]) == "filtered_source"
    assert reason({"prompt": "p"}, exclude_sources=["math"]) == ""
    assert reason({"prompt": "p", "source": ["math"]}, sources=["math"]) == "filtered_source"


def test_lengths_count_all_turns() -> None:
    row = {"prompt": "12345", "response": "123"}
    assert reason(row, min_chars=8) == reason(row, max_chars=8) == reason(row, max_turns=2) == ""
    assert reason(row, min_chars=9) == "too_short"
    assert reason(row, max_chars=7) == reason(row, max_turns=1) == "too_long"


def test_the_language_column_decides_where_there_is_one() -> None:
    row = {"prompt": "Bonjour, comment allez-vous aujourd'hui ?", "language": "English"}
    assert reason(row, languages=["English"]) == ""
    assert reason(row, languages=["fr"]) == "filtered_language"
    wanted = spec(filters={"languages": ["English"]})
    assert check_language(row, talk(row["prompt"]), wanted) is None


@pytest.mark.parametrize(
    ("text", "rejected"),
    [
        ("What is the capital of France, and how many people live there?", False),
        ("Bonjour, pouvez-vous m'expliquer comment fonctionne un moteur ?", True),
        ("你好,请告诉我今天的天气怎么样,我要不要带伞?", True),
        ("Wie funktioniert eigentlich ein Verbrennungsmotor genau?", True),
        # Too little to tell: kept.
        ("12345", False),
        ("x = 3 + 4", False),
        ("If $f(x)=\\frac{1}{x}$, find $\\int f dx$.", False),
        ("", False),
    ],
)
def test_the_language_is_detected_where_no_column_says_it(text: str, rejected: bool) -> None:
    found = check_language({}, talk(text), spec(filters={"languages": ["en"]}))
    assert (found is not None) == rejected
    assert found is None or found.reason == "filtered_language"


def test_no_filter_detects_no_language() -> None:
    assert check_language({}, talk("Bonjour tout le monde"), spec()) is None


def test_a_language_that_cannot_be_detected_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"dataset\.filters\.languages: English cannot be detected; .*en, de, zh"):
        check_language({}, talk("hello"), spec(filters={"languages": ["English"]}))


def test_a_row_that_another_language_rejects_hides_no_later_one_of_the_same_conversation() -> None:
    french = "Bonjour, pouvez-vous m'expliquer comment fonctionne un moteur ?"
    wanted = spec(filters={"languages": ["en"]})
    found = normalise({"prompt": french}, wanted)
    assert isinstance(found, Rejection) and found.reason == "filtered_language"
    assert normalise({"prompt": french, "language": "en"}, wanted) == talk(french)


# --- decontamination --------------------------------------------------------------------------------------------------

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
CHINESE = "请用简单的语言解释相对论的基本思想"


@pytest.mark.parametrize(
    ("prompt", "conversation", "found"),
    [
        ("What is it?", talk("what  IS it"), True),
        ("What is it?", talk("hi", "hello", "What is it?!"), True),
        ("What is it?", talk("hi", "What is it?"), False),  # the answer; short prompts count as whole user turns
        ("What is it?", talk("Tell me: what is it?"), False),
        (
            LONG,
            talk("Please: ONE, two three four five six seven eight nine ten eleven twelve -- thirteen. Thanks"),
            True,
        ),
        (LONG, talk("please two three four five six seven eight nine ten eleven twelve thirteen fourteen!"), True),
        (LONG, talk("one two three four five six seven eight nine ten eleven twelve and thirteen"), False),
        (LONG, talk("hi", f"They ask: {LONG}"), True),
        (CHINESE, talk(f"老师说:{CHINESE}。"), True),
        (CHINESE, talk("请解释量子力学的基本思想好吗谢谢你"), False),
        ("Straße", talk("STRASSE"), True),
        ("Où est le café?", talk("Ou\u0300 est le cafe\u0301 ?"), True),  # accents apart
    ],
)
def test_evaluation_prompts_are_found(prompt: str, conversation: list, found: bool) -> None:
    outcome = Decontamination(["something else entirely", prompt]).check(conversation)
    assert (outcome is not None) == found
    assert outcome is None or (outcome.reason == "overlaps_evaluation" and prompt[:20] in outcome.detail)


def test_without_prompts_nothing_is_found() -> None:
    assert Decontamination([]).check(talk("", LONG)) is None


def test_what_is_looked_for_has_an_identity() -> None:
    one, same, other = (Decontamination(p).content_id for p in (["A b", "c"], ["c.", "a B"], ["a b", "d"]))
    assert one == same != other


WORDS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=13, max_size=30)


@given(prompt=WORDS, text=WORDS)
def test_any_thirteen_words_in_a_row_are_found(prompt: list[str], text: list[str]) -> None:
    runs = {" ".join(prompt[i : i + 13]) for i in range(len(prompt) - 12)}
    expected = any(run in " ".join(text) for run in runs)
    assert (Decontamination([" ".join(prompt)]).check(talk(" ".join(text))) is not None) == expected
