"""Prompts of many kinds, made of templates and word lists by a seeded draw: the same ones on every machine."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from eagle3_pipeline.evaluation.prompts import load_prompts
from eagle3_pipeline.store.atomic import write_bytes
from eagle3_pipeline_tests.benchmarks.one_gpu import quality_words as words

_SEED = 20
_SLOT = re.compile(r"{(\w+)}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")
_LISTS = {
    "topic": words.TOPICS,
    "object": words.OBJECTS,
    "place": words.PLACES,
    "job": words.JOBS,
    "animal": words.ANIMALS,
    "food": words.FOODS,
    "hobby": words.HOBBIES,
    "name": words.NAMES,
    "situation": words.SITUATIONS,
    "emotion": words.EMOTIONS,
    "task": words.TASKS,
    "format": words.FORMATS,
    "genre": words.GENRES,
    "adjective": words.ADJECTIVES,
    "product": words.PRODUCTS,
    "small": [str(n) for n in range(2, 13)],
    "number": [str(n) for n in range(13, 97)],
    "price": [str(n) for n in range(15, 400, 5)],
}
# A slot that a template names twice is drawn twice, but these: who buys apples is asked about apples.
_ONE_DRAW = ("product",)
TEMPLATES: dict[str, list[str]] = {
    "explain": [
        "Explain {topic} {format}.",
        "Can you tell me something about {topic} {format}?",
        "Why are {topic} important for people? Answer {format}.",
        "How would a {job} explain {topic}?",
        "I never understood {topic}. Please help me {format}.",
        "What should everybody know about {topic}?",
    ],
    "compare": [
        "What is the difference between {topic} and {topic}?",
        "Compare a {animal} with a {animal} {format}.",
        "Which is better for a holiday, {place} or {place}, and why?",
        "How does the work of a {job} differ from that of a {job}?",
        "Name similarities between {topic} and {topic}.",
        "Is {hobby} or {hobby} the better hobby for somebody who feels {emotion}?",
    ],
    "how_to": [
        "How do I make {food} for {small} people?",
        "Give me step-by-step instructions for {food}.",
        "How can a {job} get started with {hobby}?",
        "What is the best way to deal with {situation}?",
        "How do I repair {object} at home?",
        "Explain how to teach {hobby} to a group of {small} children.",
        "How can I take good care of a {animal}?",
    ],
    "list": [
        "List {small} facts about {topic}.",
        "Name {small} things to see in {place}.",
        "Give me {small} ideas for {situation}.",
        "What are {small} reasons to try {hobby}?",
        "List {small} tools that a {job} uses and what they are for.",
        "Write down {small} questions that a {job} could ask about {topic}.",
        "Suggest {small} names for a {animal} that lives in {place}.",
    ],
    "story": [
        "Write a short {genre} about a {job} and {object}.",
        "Tell me a {genre} that takes place in {place}.",
        "Write a {genre} in which a {animal} meets a {animal}.",
        "Begin a {genre} with {name} finding {object} in a {adjective} street.",
        "Write a {genre} about {name}, a {emotion} {job}, and {situation}.",
        "Tell a {genre} about a {adjective} village, a {animal} and {object}.",
    ],
    "email": [
        "Write an e-mail to a {job} about {situation}.",
        "Write a polite e-mail in which {name} asks {name} to return {object}.",
        "Draft an invitation to a course on {hobby} in {place}.",
        "Write a complaint about {object} that arrived broken. My name is {name}.",
        "Write a short e-mail to my team about {topic} and {situation}.",
        "Write a reply to {name}, who feels {emotion} because of {situation}.",
    ],
    "poem": [
        "Write a short poem about {object} and a {adjective} morning.",
        "Write a poem of four lines about a {animal} in {place}.",
        "Write a haiku about {topic}.",
        "Write a funny rhyme about a {job} who likes {hobby}.",
        "Write a {emotion} poem about {place}.",
    ],
    "rewrite": [
        'Rewrite this sentence in a formal tone: "{name} was {emotion} about {situation}, so we bought {object}."',
        'Make this sentence shorter: "In {place} there is a {job} who, whenever possible, spends time on {hobby}."',
        'Turn this into a question: "{name} learned about {topic} from a {job} in {place}."',
        'Write this in the past tense: "The {animal} sees {object} and runs to the {job}."',
        'Correct the mistakes: "{name} dont like {hobby} becaus it make him {emotion}."',
        'Say this in other words: "{situation} made {name} {emotion}, but {hobby} helped."',
    ],
    "facts": [
        "What is {place} famous for?",
        "Where does the {animal} live and what does it eat?",
        "What language do people speak in {place}, and what do they like to eat?",
        "Who works with {topic}, and what do they do all day?",
        "When did people begin to use {topic}?",
        "What does a {job} do?",
        "How long does a {animal} live compared with a {animal}?",
        "What is the weather like in {place} in month {small} of the year?",
    ],
    "code": [
        "Write a Python function that {task}.",
        "Write a Python function that {task}, and one that {task}.",
        "Show me Python code that {task}, with a short explanation.",
        "Write a Python program for a {job} that {task}.",
        "How would you test a Python function that {task}?",
        "Write a Python class named {name} with a method that {task}.",
    ],
    "arithmetic": [
        "{name} has {number} {product} and buys {small} more. How many {product} are there now?",
        "A {job} buys {small} boxes with {number} {product} each. How many {product} is that?",
        "{object} costs {price} dollars. How much do {small} of them cost?",
        "What is {number} plus {number} times {small}?",
        "{name} shares {number} {product} among {small} friends. How many does each get, and how many are left?",
        "A car drives {number} kilometres an hour. How far does it get in {small} hours?",
        "If {small} {product} cost {price} dollars, what do {number} {product} cost?",
    ],
    "role_play": [
        "You are a {job} in {place}. Introduce yourself to {name}.",
        "Pretend to be a {animal} and tell me about your day in {place}.",
        "You are a {emotion} {job}. {name} asks you about {topic}. What do you say?",
        "Let us play: you sell {object} and I am a {job} with {price} dollars. Begin.",
        "Talk to me like a {job} from a {genre} and explain {topic}.",
        "Write a dialogue between a {job} and a {job} about {topic}.",
    ],
    "small_talk": [
        "I feel {emotion} today because of {situation}.",
        "What do you think about {hobby}?",
        "Hello, my name is {name} and I am a {job}. What shall we talk about?",
        "Do you prefer {place} or {place}?",
        "I just came back from {place}. Ask me something about it.",
        "My {animal} is {emotion} today. Any idea why?",
        "Tell me a joke about a {job} and a {animal}.",
        "I am {emotion} and would like to start {hobby}. Is that a good idea?",
    ],
    "definition": [
        "Define {topic} {format}.",
        'What does the word "{emotion}" mean? Use it in a sentence about a {job}.',
        "What does a {job} mean by {topic}?",
        "Give a definition of {topic} and of {topic}.",
        "What is meant by {hobby}, and who does it?",
    ],
    "plan": [
        "Plan {small} days in {place} for somebody who loves {hobby}.",
        "Make a plan for {situation} with a budget of {price} dollars.",
        "Make a weekly schedule for a {job} who wants to learn {hobby}.",
        "Plan a dinner with {food} and {food} for {number} guests.",
        "Plan a lesson of {number} minutes about {topic}.",
        "Help {name} plan {situation} together with a {job}.",
    ],
    "summarise": [
        "Summarise this in one sentence: {paragraph}",
        "What is the main point of this text? {paragraph}",
        "Read this and say how {name} could help: {paragraph}",
        "Give this text a title and a summary: {paragraph}",
    ],
}
_SENTENCES = [
    "{name}, a {job} from {place}, found {object} on the way to work.",
    "The {adjective} town was known for {topic}.",
    "Nobody expected that {situation} would change the week.",
    "For {small} years there had been talk about {topic}, but nothing happened.",
    "A {animal} sat in front of the house and looked {emotion}.",
    "In the evening everybody met for {food} and talked about {hobby}.",
    "It cost {price} dollars, which was more than {name} wanted to pay.",
    "Visitors from {place} said that it reminded them of {topic}.",
    "After {small} weeks the {job} gave up and went back to {place}.",
    "{name} felt {emotion}, because {hobby} had become impossible.",
]
_PARAGRAPH_SENTENCES = (3, 5)
# Prompts that the training templates do not make, written by hand.
HELD_OUT: dict[str, list[str]] = {
    "coding": [
        "Write a Python function that tells whether a bracket sequence is balanced.",
        "How do I open a text file in Python and print each line with its number?",
        "Write a Python loop that prints the squares of 1 to 10.",
        "What is the difference between a list and a tuple in Python?",
        "Write a Python function to count down from ten and then say liftoff.",
        "Explain what a dictionary comprehension is and give an example.",
        "Write a small Python class for a bank account with deposit and withdraw.",
        "Why does Python raise an IndexError, and how do I avoid it?",
    ],
    "chat": [
        "Hi! How has your day been so far?",
        "I cannot decide what to watch tonight. Any suggestions?",
        "My best friend is moving away next month and I do not know what to say.",
        "Do you think that people will live on Mars one day?",
        "I spilled coffee on my keyboard. What now?",
        "Let us talk about music. What makes a song good?",
        "I finally passed my driving test!",
        "What would you cook if your grandmother came to dinner?",
    ],
    "lists": [
        "List five things that I should pack for a week at the beach.",
        "Name six vegetables that grow well on a balcony.",
        "Give me four ideas for a gift for my father.",
        "What are the steps to change a flat tyre?",
        "List three advantages of working from home.",
        "Give me seven questions for a quiz about geography.",
        "Name five inventions that changed how people travel.",
        "What do I need to do before I adopt a cat?",
    ],
    "long_form": [
        "Write a story about a baker who discovers a hidden door behind the oven.",
        "Write an essay of two paragraphs on why reading matters.",
        "Write a letter to your future self.",
        "Explain how a letter travels from a mailbox to its receiver.",
        "Write a speech for the opening of a playground.",
        "Describe how a town changes from winter to spring.",
        "Tell the story of a raindrop from cloud to sea.",
        "Write a review of a restaurant where everything went wrong.",
    ],
}


def draw_prompts(count: int) -> list[str]:
    """Different prompts, one of each category in turn; a smaller count gives the first ones of a larger."""
    return [prompt for prompt, _ in zip(_all_prompts(), range(count), strict=False)]


def write_prompts(path: Path, count: int) -> None:
    """Writes them as rows of a data set."""
    write_bytes(path, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in draw_prompts(count)).encode())


def write_evaluation(path: Path, per_category: int) -> None:
    """Writes the project's own evaluation prompts and `HELD_OUT`."""
    own: dict[str, list[str]] = {}
    for prompt in load_prompts("builtin:demo"):
        own.setdefault(prompt.category, []).append(prompt.prompt)
    rows = [(name, prompt) for name, found in {**own, **HELD_OUT}.items() for prompt in found[:per_category]]
    lines = (json.dumps({"category": name, "prompt": prompt}) + "\n" for name, prompt in rows)
    write_bytes(path, "".join(lines).encode())


def _all_prompts() -> Iterator[str]:
    draw = random.Random(_SEED)
    seen: set[str] = set()
    while True:
        for templates in TEMPLATES.values():
            prompt = _fill(_choose(draw, templates), draw)
            while prompt in seen:
                prompt = _fill(_choose(draw, templates), draw)
            seen.add(prompt)
            yield prompt


def _fill(template: str, draw: random.Random) -> str:
    drawn: dict[str, str] = {}

    def value(slot: re.Match[str]) -> str:
        name = slot.group(1)
        if name == "paragraph":
            return _paragraph(draw)
        found = _choose(draw, _LISTS[name])
        return drawn.setdefault(name, found) if name in _ONE_DRAW else found

    text = _ARTICLE.sub(r"\1n ", _SLOT.sub(value, template))
    return text[0].upper() + text[1:]


def _paragraph(draw: random.Random) -> str:
    least, most = _PARAGRAPH_SENTENCES
    number = least + int(draw.random() * (most - least + 1))
    return " ".join(_fill(_choose(draw, _SENTENCES), draw) for _ in range(number))


def _choose(draw: random.Random, entries: list[str]) -> str:
    # `random` alone is promised to give the same numbers in all versions of Python.
    return entries[int(draw.random() * len(entries))]
