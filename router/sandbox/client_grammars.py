"""Regular expressions, choices and grammars of clients, as Lark text for llguidance."""

import json
import re

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from ..api.structured import ConstraintKind
from ..errors import ApiError, bad_request

# characters of a constant, a name or a pattern: each mask of a step walks it, up to 0.5 ms per 1000
MAX_TEXT = 2048
MAX_GRAMMAR_TEXT = 16384  # characters of a client's grammar
DIRECTIVES = ("%import", "%ignore")  # of Lark; others reach around the checks of schemas
# comments, strings and patterns of Lark, in which any character may stand
QUOTED = re.compile(r'//[^\n]*|"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\])+/[imslux]*', re.DOTALL)
TOKEN_RANGE = "<["  # begins one; refused also in quotes, where it need not stand in one piece
COUNTS = re.compile(r"\{\s*([0-9]+)\s*(?:,\s*([0-9]*)\s*)?\}")


def lark_of(kind: ConstraintKind, text: str, field: str) -> str:
    """The Lark text of a client's constraint that is not JSON. Raises ApiError (400), which names `field`."""
    if kind == "choice":
        choices: list[str] = json.loads(text)
        _check_lengths(choices, field)
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)
    check_repeats(text, field)
    if kind == "regex":
        _check_lengths([text], field)
        found: str = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        return found
    return _lark_of_grammar(text, field)


def _lark_of_grammar(text: str, field: str) -> str:
    if len(text) > MAX_GRAMMAR_TEXT:
        raise bad_request(
            f"{field}: a grammar of {len(text)} characters is longer than {MAX_GRAMMAR_TEXT}", param=field
        )
    try:
        lark = any_to_lark(text)
    except Exception as error:  # of any kind, of a translator that expects GBNF
        raise refused(field, field, str(error) or type(error).__name__) from None
    _check_lengths(QUOTED.findall(lark), field)
    bare = QUOTED.sub(" ", lark).replace("%llguidance {}", "")  # the translator's
    directive = next((word for word in re.findall(r"%[a-z]+", bare) if word not in DIRECTIVES), "")
    if directive or "<" in bare or "@" in bare or TOKEN_RANGE in lark:
        what = directive or "a token of the vocabulary (<...>) or another grammar (@...)"
        raise bad_request(f"{field}: {what} cannot be used in a grammar here", param=field)
    return lark


def _check_lengths(texts: list[str], field: str) -> None:
    longest = max(map(len, texts), default=0)
    if longest > MAX_TEXT:
        raise bad_request(
            f"{field}: a text of {longest} characters must be met, more than {MAX_TEXT}", param=field
        )


def check_repeats(text: str, field: str) -> None:
    """Bounds repetitions, which may force a text that is much longer than the pattern.

    Raises ApiError (400).
    """
    most = max((int(number) for pair in COUNTS.findall(text) for number in pair if number), default=0)
    if most > MAX_TEXT:
        raise bad_request(f"{field}: {most} repetitions are more than {MAX_TEXT}", param=field)


# What llguidance says, by words of it, for those who do not know llguidance.
SAID = {
    "NoExtensionBias": "it refers to nothing but itself",
    "does not fetch resources": "a $ref to another document is not fetched; put that schema into $defs",
    "coerce_one_of": "a oneOf whose parts may both hold; write anyOf",
    "Expecting object schema": "a schema of true or false where an object is required; write {}",
}


def refused(param: str, what: str, reason: str) -> ApiError:
    """The ApiError (400) for a constraint that cannot be followed."""
    reason = next((said for words, said in SAID.items() if words in reason), reason)
    line = "".join(char if char.isascii() and char.isprintable() else " " for char in reason[:200])
    return bad_request(f"{what} cannot be followed: {line}", param=param)
