"""Texts and questions for `eval`, generated from a seed so that runs are reproducible."""

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
    """A text, a question, and the expected answers."""

    context: str
    question: str
    answers: List[str]


def _filler(numbers: random.Random, words: int) -> List[str]:
    """Returns words of meaningless sentences."""
    out: List[str] = []
    while len(out) < words:
        sentence = numbers.choices(_FILL, k=numbers.randint(5, 11))
        out += [sentence[0].capitalize(), *sentence[1:-1], sentence[-1] + "."]
    return out


def _insert_needles(numbers: random.Random, words: int, needles: List[str]) -> str:
    """Returns filler with `needles` inserted at random sentence ends, in order."""
    text = _filler(numbers, words)
    ends = [i + 1 for i, word in enumerate(text) if word.endswith(".")]
    for position, needle in zip(sorted(numbers.sample(ends, len(needles)), reverse=True),
                                reversed(needles)):
        text.insert(position, needle)
    return " ".join(text)


def needle(numbers: random.Random, words: int) -> Sample:
    """Asks for one number that is hidden in filler."""
    name, value = numbers.choice(_NAMES), str(numbers.randint(10_000, 99_999))
    text = _insert_needles(numbers, words, [f"The secret number of {name} is {value}."])
    return Sample(text, f"\nThe secret number of {name} is", [value])


def variables(numbers: random.Random, words: int) -> Sample:
    """Asks for a value that is assigned along a chain of variables."""
    names = numbers.sample(_NAMES, 4)
    value = str(numbers.randint(10_000, 99_999))
    chain = [f"Let {names[0]} = {value}."]
    chain += [f"Let {b} = {a}." for a, b in zip(names, names[1:])]
    text = _insert_needles(numbers, words, chain)
    return Sample(text, f"\nThe value of {names[-1]} is", [value])


def aggregation(numbers: random.Random, words: int) -> Sample:
    """Asks for the three most frequent names."""
    often = numbers.sample(_NAMES, 3)
    rare = [name for name in _NAMES if name not in often]
    needles = [f"Seen: {name}." for name in often for _ in range(8)]
    needles += [f"Seen: {name}." for name in numbers.sample(rare, 8)]
    numbers.shuffle(needles)
    text = _insert_needles(numbers, max(words, 400), needles)
    return Sample(text, "\nThe three that were seen most often are", often)


TASKS: Dict[str, Callable[[random.Random, int], Sample]] = {
    "needle": needle, "variables": variables, "aggregation": aggregation,
}


def prose(seed: int, words: int) -> str:
    """Returns the default text for perplexity: filler with repeated facts."""
    numbers = random.Random(seed)
    facts = [f"The number of {name} is {numbers.randint(100, 999)}." for name in _NAMES]
    needles = [numbers.choice(facts) for _ in range(max(1, words // 40))]
    return _insert_needles(numbers, words, needles)
