"""Every command on the pages for users names its machine, and its flags exist."""

import contextlib
import io

import pytest
from baton.__main__ import COMMANDS, main
from baton.tests.meta.doc_commands import PAGES, baton_calls, sections

GROUPS = ("bench", "deploy", "draft", "keys")  # commands of commands


@pytest.fixture(scope="module")
def help_of():
    """The text of `--help`, by the words before it."""
    known = {}

    def read(words):
        if words not in known:
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
                main([*words, "--help"])
            known[words] = out.getvalue()
        return known[words]

    return read


@pytest.mark.parametrize("page", PAGES)
def test_a_section_with_commands_names_its_machine(page):
    assert [str(section) for section in sections(page) if not section.mark] == []


def test_some_sections_run_on_every_machine():
    found = [str(section) for page in PAGES for section in sections(page) if section.runs_here]
    assert {"quickstart: Laptop", "tuning: Measure first", "runbook: First look"} <= set(found)


@pytest.mark.parametrize("page", PAGES)
def test_every_call_of_baton_has_a_command_and_flags_that_exist(page, help_of):
    for words in baton_calls(page):
        names = tuple(word for word in words[1:4] if not word.startswith("-"))
        if not names:
            continue
        assert names[0] in COMMANDS, words
        depth = 2 if names[0] in GROUPS and len(names) > 1 else 1
        if names[:3] and names[:2] == ("keys", "api"):
            depth = 3
        text = help_of(names[:depth])
        assert text, f"{' '.join(names[:depth])} has no --help"
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert flag in text, f"docs/{page}.md: {' '.join(words)}: no {flag}"
