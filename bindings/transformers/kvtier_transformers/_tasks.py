"""Texts and questions for `eval`: made from a seed, so that two runs ask the same."""

from __future__ import annotations

import random
from typing import Callable, Dict, List, NamedTuple

_FILL = ("the a one some every this that old new small large quiet bright cold warm river garden "
         "window letter market engine bridge teacher farmer sailor doctor morning evening winter "
         "summer paper stone water light walks waits sings reads carries opens closes finds keeps "
         "leaves under over near behind between slowly often never always again today").split()
_NAMES = ("amber basil cedar delta ember fjord grove hazel indigo jasper kelp lotus maple nickel "
          "olive pearl quartz raven saffron topaz umber violet willow xenon yarrow zinc").split()


class Sample(NamedTuple):
    """A text, and what a model that has read all of it would say next."""

    context: str
    question: str
    answers: List[str]


def _filler(numbers: random.Random, words: int) -> List[str]:
    """Sentences that mean nothing."""
    out: List[str] = []
    while len(out) < words:
        sentence = numbers.choices(_FILL, k=numbers.randint(5, 11))
        out += [sentence[0].capitalize(), *sentence[1:-1], sentence[-1] + "."]
    return out


def _hidden(numbers: random.Random, words: int, needles: List[str]) -> str:
    """A text with sentences in it, in their order, at places anywhere."""
    text = _filler(numbers, words)
    ends = [i + 1 for i, word in enumerate(text) if word.endswith(".")]
    for place, needle in zip(sorted(numbers.sample(ends, len(needles)), reverse=True),
                             reversed(needles)):
        text.insert(place, needle)
    return " ".join(text)


def needle(numbers: random.Random, words: int) -> Sample:
    """One number among filler."""
    name, value = numbers.choice(_NAMES), str(numbers.randint(10_000, 99_999))
    text = _hidden(numbers, words, [f"The secret number of {name} is {value}."])
    return Sample(text, f"\nThe secret number of {name} is", [value])


def variables(numbers: random.Random, words: int) -> Sample:
    """A value that is handed on from variable to variable."""
    names = numbers.sample(_NAMES, 4)
    value = str(numbers.randint(10_000, 99_999))
    chain = [f"Let {names[0]} = {value}."]
    chain += [f"Let {b} = {a}." for a, b in zip(names, names[1:])]
    text = _hidden(numbers, words, chain)
    return Sample(text, f"\nThe value of {names[-1]} is", [value])


def aggregation(numbers: random.Random, words: int) -> Sample:
    """The words that come most often."""
    often = numbers.sample(_NAMES, 3)
    rare = [name for name in _NAMES if name not in often]
    needles = [f"Seen: {name}." for name in often for _ in range(8)]
    needles += [f"Seen: {name}." for name in numbers.sample(rare, 8)]
    numbers.shuffle(needles)
    text = _hidden(numbers, max(words, 400), needles)
    return Sample(text, "\nThe three that were seen most often are", often)


TASKS: Dict[str, Callable[[random.Random, int], Sample]] = {
    "needle": needle, "variables": variables, "aggregation": aggregation,
}


def prose(seed: int, words: int) -> str:
    """A text for perplexity where none is given: filler with facts that come again."""
    numbers = random.Random(seed)
    facts = [f"The number of {name} is {numbers.randint(100, 999)}." for name in _NAMES]
    needles = [numbers.choice(facts) for _ in range(max(1, words // 40))]
    return _hidden(numbers, words, needles)
