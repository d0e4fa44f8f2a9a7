"""Arithmetic questions for reinforcement learning, and the reward of an answer."""

import re
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question in words and its answer."""

    text: str
    answer: int

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation that asks it."""
        return [{"role": "user", "content": self.text}]


def questions(count: int, *, seed: int, step: int, largest: int = 9) -> list[Question]:
    """`count` additions of numbers up to `largest`; a step's questions depend on seed and step."""
    rng = np.random.default_rng([seed, step])
    pairs = rng.integers(0, largest + 1, (count, 2)).tolist()
    form = "What is {} + {}? Answer with the number only."
    return [Question(text=form.format(a, b), answer=a + b) for a, b in pairs]


def reward(question: Question, text: str) -> float:
    """1 for the right number first, 0.2 more where there is nothing but a number."""
    numbers = re.findall(r"-?\d+", text)
    right = bool(numbers) and int(numbers[0][:9]) == question.answer
    bare = re.fullmatch(r"\s*-?\d+\.?\s*", text) is not None
    return float(right) + 0.2 * bare


def lowercase(question: Question, text: str) -> float:
    """The share of small letters: a reward that varies with random weights too."""
    del question
    return sum(c.islower() for c in text) / max(len(text), 1)


REWARDS = {"answer": reward, "lowercase": lowercase}
