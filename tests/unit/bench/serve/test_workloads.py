"""Workloads of `baton bench serve`: lengths of the named mixes, files, conversations, shared prefixes."""

import itertools
import json
import random
import statistics

import pytest
from baton.bench.serve.load import Bound, Level
from baton.bench.serve.prompts import MOST_FAULTS
from baton.bench.serve.workloads import FILE, named_mixes, workload_of
from baton.cluster.errors import ConfigError
from baton.tests.unit.bench.serve.scripted import NUM_TOKENS, Scripted, measured

SETTINGS = {"vocab": 300, "seed": 5, "context": 0, "is_plain": False}


def drawn(name, count=4000):
    rng = random.Random(2)
    return [named_mixes()[name].draw(rng) for _ in range(count)]


def file_of(tmp_path, *lines):
    path = tmp_path / "workload.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def asked(name, count, seed=1, **settings):
    questions = workload_of(name, **(SETTINGS | settings)).questions(random.Random(seed))
    return list(itertools.islice(questions, count))


def test_mixes_have_the_lengths_of_the_benchmarks_page():
    chat = [conversation.turns for conversation in drawn("chat")]
    assert {len(turns) for turns in chat} == {1}
    assert statistics.median(turns[0].prompt_tokens for turns in chat) == pytest.approx(1020, rel=0.05)
    assert statistics.median(turns[0].output_tokens for turns in chat) == pytest.approx(129, rel=0.05)
    turns = [turn for conversation in drawn("turns") for turn in conversation.turns]
    assert statistics.mean(turn.prompt_tokens for turn in turns) == pytest.approx(69.5, rel=0.05)
    assert statistics.mean(turn.output_tokens for turn in turns) == pytest.approx(214.5, rel=0.05)
    documents = [conversation.turns[0] for conversation in drawn("documents")]
    assert statistics.mean(turn.prompt_tokens for turn in documents) == pytest.approx(7590, rel=0.05)
    assert statistics.mean(turn.output_tokens for turn in documents) == pytest.approx(182, rel=0.05)


def test_conversations_have_several_turns_behind_few_prefixes():
    conversations = drawn("turns")
    counts = [len(conversation.turns) for conversation in conversations]
    assert statistics.mean(counts) == pytest.approx(4, rel=0.1)
    assert (min(counts), max(counts)) == (1, 12)
    assert len({conversation.prefix for conversation in conversations}) == 8
    assert {conversation.prefix_tokens for conversation in conversations} == {512}


def test_every_mix_names_its_motivation_and_claims_no_figure_of_it():
    for values in json.loads(FILE.read_text()).values():
        assert "arXiv" in values["source"]
        assert values["source"].startswith("every parameter is ours; after ")


def test_each_turn_sends_the_history_and_the_next_prompt(tmp_path):
    turns = [{"prompt_tokens": 5, "output_tokens": 3}, {"prompt_tokens": 4, "output_tokens": 2}]
    (question,) = asked(file_of(tmp_path, {"turns": turns, "prefix": "a", "prefix_tokens": 10}), 1)
    (second,) = question.then
    first_ids, second_ids = question.body["prompt"], second.body["prompt"]
    assert (len(first_ids), len(second_ids)) == (15, 15 + 3 + 4)
    assert second_ids[:15] == first_ids
    assert (question.body["max_tokens"], second.body["max_tokens"]) == (3, 2)
    assert all(3 <= token < 300 for token in second_ids)


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("has_own_answers", [False, True])
def test_own_answers_stand_in_the_history_in_place_of_random_ids(tmp_path, takes_turns, has_own_answers):
    turns = [{"prompt_tokens": 6, "output_tokens": NUM_TOKENS}] * 3
    path, endpoint = file_of(tmp_path, {"turns": turns}), Scripted()
    settings = SETTINGS | {"has_own_answers": has_own_answers}
    questions = workload_of(path, **settings).questions(random.Random(1))
    measured(endpoint, Level(width=1), Bound(num_requests=6), questions=questions, takes_turns=takes_turns)
    prompts = sorted((body["prompt"] for body in endpoint.bodies), key=len)
    assert [len(prompt) for prompt in prompts] == [6, 6, 17, 17, 28, 28]
    for prompt in prompts:
        answers = [prompt[at : at + NUM_TOKENS] for at in range(6, len(prompt), 11)]
        assert [answer == [7] * NUM_TOKENS for answer in answers] == [has_own_answers] * len(answers)


def test_lines_with_one_prefix_share_its_tokens_and_no_others(tmp_path):
    lines = [
        {"prompt_tokens": 5, "output_tokens": 3, "prefix": name, "prefix_tokens": tokens}
        for name, tokens in (("a", 10), ("a", 6), ("b", 10))
    ]
    a, short, b = (question.body["prompt"] for question in asked(file_of(tmp_path, *lines), 3))
    again, *_ = asked(file_of(tmp_path, *lines), 1, seed=9)
    assert a[:6] == short[:6]
    assert a[:10] == again.body["prompt"][:10]
    assert a[:10] != b[:10]
    assert a[10:] != again.body["prompt"][10:]


def test_prompt_and_answer_are_cut_to_the_context(tmp_path):
    turns = [{"prompt_tokens": 60, "output_tokens": 30}] * 3
    path = file_of(tmp_path, {"turns": turns}, {"prompt_tokens": 500, "output_tokens": 90})
    conversation, long = asked(path, 2, context=100)
    assert len(conversation.body["prompt"]) + conversation.body["max_tokens"] == 90
    assert conversation.then == (), "the second turn would have 180 tokens"
    assert len(long.body["prompt"]) + long.body["max_tokens"] == 100
    for question in asked("documents", 50, context=1000):
        assert len(question.body["prompt"]) + question.body["max_tokens"] <= 1000


def test_literal_prompts_keep_their_text_and_may_end_by_themselves(tmp_path):
    path = file_of(
        tmp_path, {"prompt": "a", "max_tokens": 9}, {"messages": [{"role": "user", "content": "b"}]}, ""
    )
    completion, chat = asked(path, 2)
    assert (completion.path, completion.body["prompt"]) == ("/v1/completions", "a")
    assert (chat.path, chat.body["max_tokens"]) == ("/v1/chat/completions", 128)
    assert completion.body["ignore_eos"] is False
    assert "ignore_eos" not in asked(path, 1, is_plain=True)[0].body


def test_line_separators_inside_a_text_end_no_line(tmp_path):
    text = "a\u2028b\u2029c\u0085d"
    path = file_of(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False), {"prompt": "e"})
    assert [question.body["prompt"] for question in asked(path, 2)] == [text, "e"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is no JSON"),
        ("[1]", "write a JSON object"),
        ({}, '"prompt_tokens" and "output_tokens", or "turns"'),
        ({"prompt_tokens": 5}, '"output_tokens" is a whole number from 1 up, not null'),
        ({"prompt_tokens": 0, "output_tokens": 1}, '"prompt_tokens" is a whole number from 1 up, not 0'),
        ({"prompt_tokens": True, "output_tokens": 1}, "not true"),
        ({"prompt_tokens": 1.5, "output_tokens": 1}, "not 1.5"),
        ({"prompt_tokens": 5, "output_tokens": 1, "x": 1}, 'unknown field "x"; known here: output_tokens'),
        ({"prompt_tokens": 5, "output_tokens": 1, "prefix": "a"}, '"prefix_tokens" is a whole number'),
        ({"prompt_tokens": 5, "output_tokens": 1, "prefix_tokens": 4}, '"prefix" is the name'),
        ({"turns": []}, '"turns" is a list'),
        ({"turns": [3]}, '"turns" is a list'),
        ({"turns": [{"prompt_tokens": 1}]}, '"output_tokens"'),
        ({"turns": [{"prompt": "a"}]}, 'unknown field "prompt"'),
        ({"prompt": ""}, '"prompt" is a text'),
        ({"prompt": [1, -1]}, '"prompt" is a text or a list of token ids'),
        ({"messages": "a"}, '"messages" is a list'),
        ({"prompt": "a", "messages": [{}]}, '{"prompt": TEXT or [IDS]}'),
        ({"prompt": "a", "max_tokens": 0}, '"max_tokens" is a whole number'),
        ({"prompt": "a", "prefix": "b"}, 'unknown field "prefix"'),
        ("[" * 100_000, "is no JSON"),
        ({"prompt_tokens": 10**12, "output_tokens": 1}, '"prompt_tokens" is at most 16777216'),
    ],
)
def test_each_bad_line_is_one_error_with_its_number(tmp_path, line, words):
    good = {"prompt_tokens": 5, "output_tokens": 1}
    with pytest.raises(ConfigError) as caught:
        workload_of(file_of(tmp_path, good, line, "", good, line), **SETTINGS)
    first, second = str(caught.value).split("\n")
    assert "line 2: " in first
    assert "line 5: " in second
    assert words in first


def test_many_bad_lines_and_unusable_files_are_summed_up(tmp_path):
    with pytest.raises(ConfigError) as caught:
        workload_of(file_of(tmp_path, *["{}"] * 50), **SETTINGS)
    lines = str(caught.value).split("\n")
    assert len(lines) == MOST_FAULTS + 1
    assert lines[-1].endswith("40 more bad lines")
    with pytest.raises(ConfigError, match="has no line"):
        workload_of(file_of(tmp_path, ""), **SETTINGS)
    with pytest.raises(ConfigError, match=r"no mix of this name: chat, turns, documents"):
        workload_of("chatt", **SETTINGS)


# --- conversations under load -------------------------------------------------------------------------------


def conversations(tmp_path, num_turns):
    turns = [{"prompt_tokens": 5, "output_tokens": 3}] * num_turns
    workload = workload_of(file_of(tmp_path, {"turns": turns}), **SETTINGS)
    return workload.questions(random.Random(1))


@pytest.mark.parametrize("level", [Level(width=2), Level(rate=50.0)], ids=str)
def test_a_turn_is_sent_when_the_answer_before_it_is_complete(tmp_path, level):
    endpoint = Scripted()
    run, figures = measured(endpoint, level, Bound(num_requests=12), questions=conversations(tmp_path, 3))
    assert figures.num_ok == 12
    by_prompt = {tuple(body["prompt"]): number for number, body in enumerate(endpoint.bodies)}
    calls = sorted(run.calls, key=lambda call: call.sent)
    num_later = 0
    for prompt, number in by_prompt.items():
        before = [ids for ids in by_prompt if len(ids) < len(prompt) and prompt[: len(ids)] == ids]
        if before:
            num_later += 1
            previous = calls[by_prompt[max(before, key=len)]]
            assert calls[number].sent >= previous.ended
            assert calls[number].due == pytest.approx(previous.ended)
    assert num_later > 0


def test_a_failed_turn_ends_its_conversation_and_the_bound_any(tmp_path):
    endpoint = Scripted(lambda number: "429" if number == 0 else "ok")
    measured(endpoint, Level(width=1), Bound(num_requests=3), questions=conversations(tmp_path, 3))
    lengths = [len(body["prompt"]) for body in endpoint.bodies]
    assert lengths == [5, 5, 5 + 3 + 5], "the second is a new conversation, and the third request is the last"
