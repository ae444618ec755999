"""From the answer of a judge to a score: one function with its formula for each way to score.

`p(t)` is the probability of the token t as the first one of the answer. An endpoint returns the
logarithms of at most the `TOP` (20) largest probabilities. The others count as 0. Tokens that
differ only in case, or in white space at their ends, count as the same token, and their
probabilities are added.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from solrl_jax.config.values import brief_repr
from solrl_jax.rewards.host import ScoringFailure
from solrl_jax.storage.readers import parse_json

# The number of log-probabilities to request: the most that OpenAI and vLLM allow by default.
TOP = 20
# The smallest probability that all accepted tokens must have together. With less, the model answers
# something else, and the score would be noise.
LEAST_MASS = 0.05
# The marks of a space in vocabularies, which some servers do not remove.
SPACES = " \t\r\n▁Ġ"

# Log-probabilities by token. Several tokens may be the same up to case and white space.
Tokens = Iterable[tuple[str, float]]


def score_digits(tokens: Tokens, low: int, high: int) -> float:
    """Returns the expected digit, scaled from its range to [0, 1].

        E = sum_d d p(d) / sum_d p(d)    with d = low, ..., high
        score = (E - low) / (high - low)

    Here p(d) is the probability that the first token of the answer is the digit d.

    Args:
        tokens: Pairs (token, natural logarithm of its probability) for the first token of the
            answer. White space around a token is ignored, and the probabilities of tokens that are
            then equal are added. Digits that are not among them have the probability 0.
        low: The lowest digit, at least 0 and below `high`.
        high: The highest digit, at most 9.

    Raises:
        ScoringFailure: If these digits together have a probability below 0.05 (`LEAST_MASS`).
    """
    digits = range(low, high + 1)
    mass = _word_probabilities(tokens, [str(digit) for digit in digits])
    expected = sum(digit * mass[str(digit)] for digit in digits) / sum(mass.values())
    return (expected - low) / (high - low)


def score_yes(tokens: Tokens) -> float:
    """Returns p(yes) / (p(yes) + p(no)), in [0, 1]: how probable the answer "yes" is.

    Args:
        tokens: Pairs (token, natural logarithm of its probability) for the first token of the
            answer. Case and white space are ignored, and the probabilities of tokens that are then
            equal are added. A word that is not among them has the probability 0.

    Raises:
        ScoringFailure: If the two words together have a probability below 0.05 (`LEAST_MASS`).
    """
    mass = _word_probabilities(tokens, ["yes", "no"])
    return mass["yes"] / (mass["yes"] + mass["no"])


def score_preference(tokens: Tokens) -> float:
    """Returns p(A) / (p(A) + p(B)), in [0, 1]: how much the first of two images is preferred.

    Here p(A) is the probability that the first token of the answer is "A", which stands for the
    first image. A model may prefer a position, whatever the images, so callers ask in both orders
    and average (`rewards.groups.win_rates`).

    Args:
        tokens: Pairs (token, natural logarithm of its probability) for the first token of the
            answer. Case and white space are ignored, and the probabilities of tokens that are then
            equal are added. A letter that is not among them has the probability 0.

    Raises:
        ScoringFailure: If the two letters together have a probability below 0.05 (`LEAST_MASS`).
    """
    mass = _word_probabilities(tokens, ["a", "b"])
    return mass["a"] / (mass["a"] + mass["b"])


def score_json(text: str, criteria: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Returns the mean of the criteria in a JSON object, each scaled from its range to [0, 1].

        score = mean_c (x_c - low_c) / (high_c - low_c)

    Args:
        text: The answer: an object with a number for each criterion, or only the number if there is
            one criterion. A Markdown fence around it is removed, and further keys are ignored.
        criteria: (lowest, highest) number of each criterion by its name, lowest below highest. At
            least one, and none with the name "reward".

    Returns:
        The mean as "reward", in [0, 1]. With several criteria, also the scaled number of each by
        its name.

    Raises:
        ScoringFailure: If `storage.readers.parse_json` refuses the text, e.g. because it is not
            JSON or repeats a key; if a criterion is missing or no number (true and "3" are none);
            or if a number is outside its range.
    """
    try:
        value = parse_json(_without_fence(text))
    except ValueError:
        raise ScoringFailure(
            f"answered {brief_repr(text)}: expected {_example(criteria)}"
        ) from None
    if len(criteria) == 1 and not isinstance(value, dict):
        value = dict.fromkeys(criteria, value)
    scores = {}
    for name, (low, high) in criteria.items():
        number: Any = value.get(name) if isinstance(value, dict) else None
        if type(number) not in (int, float) or not low <= number <= high:
            raise ScoringFailure(f"answered {brief_repr(text)}: expected {_example(criteria)}")
        scores[name] = (number - low) / (high - low)
    mean = sum(scores.values()) / len(scores)
    return {"reward": mean} | (scores if len(scores) > 1 else {})


def json_schema(criteria: Mapping[str, tuple[float, float]]) -> dict[str, object]:
    """Returns the JSON schema that asks an endpoint for answers that `score_json` can read.

    Args:
        criteria: (lowest, highest) number of each criterion by its name.

    Returns:
        A schema, without the wrapper that `response_format` needs, of an object with one required
        number in its range per criterion and no other key, as values of JSON.
    """
    return {
        "type": "object",
        "properties": {
            name: {"type": "number", "minimum": low, "maximum": high}
            for name, (low, high) in criteria.items()
        },
        "required": list(criteria),
        "additionalProperties": False,
    }


def _word_probabilities(tokens: Tokens, words: list[str]) -> dict[str, float]:
    """Sums the probabilities of the tokens that stand for the same word.

    Args:
        tokens: Pairs (token, natural logarithm of its probability) for the first token of the
            answer. A token stands for a word if it equals it in any case, without white space and
            the marks "▁" and "Ġ" at its ends. A logarithm above 0 counts as 0.
        words: The accepted answers in lower case, e.g. ["yes", "no"], at least two.

    Returns:
        The probability of each word, by the word; 0 for one without a token.

    Raises:
        ScoringFailure: If the words together have a probability below 0.05 (`LEAST_MASS`), so that
            the answer says nothing. The message has the most probable token, the words and this
            probability.
    """
    mass = dict.fromkeys(words, 0.0)
    best = ("", -math.inf)
    for token, logarithm in tokens:
        best = max(best, (token, logarithm), key=lambda pair: pair[1])
        word = token.strip(SPACES).lower()
        if word in mass:
            mass[word] += math.exp(min(logarithm, 0.0))
    total = sum(mass.values())
    if total < LEAST_MASS:
        expected = f"{words[0]} to {words[-1]}" if len(words) > 2 else " or ".join(words)
        raise ScoringFailure(
            f"its answer begins with {brief_repr(best[0])}, and {expected} have probability "
            f"{total:.2g} together: expected at least {LEAST_MASS:g}"
        )
    return mass


def _without_fence(text: str) -> str:
    """Returns a text without the Markdown fence (```json ... ```) around it, if there is one.

    Args:
        text: Any text.

    Returns:
        The lines inside the fence, with the line feeds around them. A text of one line, or one that
        does not both begin and end with ```, is only stripped of white space at its ends.
    """
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text[text.index("\n") : -3]
    return text


def _example(criteria: Mapping[str, tuple[float, float]]) -> str:
    """Returns the expected object in words, e.g. '{"score": 0 to 10}', for messages.

    Args:
        criteria: (lowest, highest) number of each criterion by its name.
    """
    entries = [f'"{name}": {low:g} to {high:g}' for name, (low, high) in criteria.items()]
    return "{" + ", ".join(entries) + "}"
