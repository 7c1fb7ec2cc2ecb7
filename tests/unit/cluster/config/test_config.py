"""Settings: where values come from, which one wins, and what is said about a wrong one."""

import dataclasses
import logging
import subprocess
import sys

import pytest
from baton.bench.engine.drafters import NGRAMS
from baton.cluster.config.fields import as_text, describe, settings_of, types_of
from baton.cluster.config.groups import LOOKUP
from baton.cluster.config.load import COMMAND_LINE, ENVIRONMENT, FILE, load_config, to_argv
from baton.cluster.config.roles import ROLES, DecodeConfig, PrefillConfig, RouterConfig, UpConfig
from baton.cluster.errors import ConfigError
from baton.deploy.up.children import child_configs
from baton.engine.config import EngineConfig
from baton.engine.hub import NGRAM
from hypothesis import given
from hypothesis import strategies as st


def load(cls, *argv, env=None, **kwargs):
    return load_config(cls, ["--model", "m", *argv], env or {}, **kwargs)


def failure(cls, *argv, env=None):
    with pytest.raises(ConfigError) as caught:
        load(cls, *argv, env=env)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "baton.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("cls", ROLES)
def test_defaults_are_legal_and_every_setting_has_help(cls):
    config = load(cls)
    assert config.model == "m"
    assert not [name for name, field in settings_of(cls).items() if not describe(field).help]


def test_command_line_beats_environment_beats_file_beats_default(toml):
    path = toml("[prefill]\nchunk_size = 1\nmax_batch = 2\nmax_queue = 3\n")
    env = {"BATON_PREFILL_CHUNK_SIZE": "10", "BATON_PREFILL_MAX_BATCH": "20"}
    config = load(PrefillConfig, "--config", path, "--chunk-size", "100", env=env)
    assert (config.chunk_size, config.max_batch, config.max_queue, config.page_size) == (100, 20, 3, 0)
    wanted = {"chunk_size": COMMAND_LINE, "max_batch": ENVIRONMENT, "max_queue": FILE}
    assert {name: config.explicit.get(name) for name in wanted} == wanted
    assert "page_size" not in config.explicit


def test_given_defaults_lose_against_everything_but_the_fields_own(toml):
    path = toml("[decode]\nspec_steps = 2\n")
    config = load(DecodeConfig, "--config", path, defaults={"spec_steps": 5, "max_running": 7})
    assert (config.spec_steps, config.max_running) == (2, 7)


def test_environment_of_another_role_is_not_read():
    assert load(PrefillConfig, env={"BATON_DECODE_PAGES": "9"}).pages == 0


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [(["--no-draft"], True), (["--no-draft", "off"], False), (["--no-draft=on"], True), ([], False)],
)
def test_a_boolean_that_is_off_by_default_reads_with_and_without_a_word(flags, wanted):
    assert load(DecodeConfig, *flags).no_draft is wanted


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [([], "auto"), (["--graphs"], "on"), (["--graphs", "off"], "off"), (["--graphs=true"], "on")],
)
def test_a_choice_of_auto_on_and_off_reads_what_a_boolean_reads(flags, wanted, toml):
    assert load(DecodeConfig, *flags).graphs == wanted
    for word, value in (("true", "on"), ("false", "off"), ("'auto'", "auto")):
        assert load(DecodeConfig, "--config", toml(f"[decode]\ngraphs = {word}\n")).graphs == value


def test_auto_is_a_word_of_every_size_that_can_be_chosen(toml):
    path = toml("[prefill]\nchunk_size = 'auto'\nmax_batch = 'auto'\ngpu_memory_share = 'auto'\n")
    default, given = load(PrefillConfig), load(PrefillConfig, "--config", path, "--max-context", "auto")
    assert dataclasses.replace(given, config="") == default
    assert "--chunk-size=auto" in to_argv(given)
    assert load(PrefillConfig, *to_argv(given)) == default


def test_zero_still_asks_for_whole_prompts_and_is_not_auto():
    assert load(PrefillConfig, "--chunk-size", "0").chunk_size == 0 != load(PrefillConfig).chunk_size


@pytest.mark.parametrize(
    ("flags", "wanted"), [(["--no-prefix-cache"], False), (["--prefix-cache=off"], False), ([], True)]
)
def test_a_boolean_that_is_on_by_default_also_reads_its_negation(flags, wanted):
    assert load(DecodeConfig, *flags).prefix_cache is wanted


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--chunk-sise", "3"], ["--chunk-sise", "did you mean '--chunk-size'"]),
        (["--chunk-size", "x"], ["--chunk-size", "'x'", "whole number"]),
        (["--chunk-size", "-4"], ["--chunk-size", "-4", "0 tokens"]),
        (["--lease-s", "nan"], ["--lease-s", "nan", "finite"]),
        (["--lease-s", "1e9"], ["--lease-s", "600"]),
        (["--device", "gpu"], ["--device", "'gpu'", "auto, cpu, cuda"]),
        (["--graphs", "maybe"], ["--graphs", "'maybe'", "auto, on, off"]),
        (["--trusted-network", "maybe"], ["--trusted-network", "'maybe'", "'on' or 'off'"]),
        (["--kv-bind", "127.0.0.1:1"], ["--kv-bind", "tcp://HOST:PORT"]),
        (["--kv-bind", "tcp://127.0.0.1"], ["--kv-bind", "tcp://HOST:PORT"]),
        (["--config", "/nowhere.toml"], ["/nowhere.toml", "cannot be read"]),
        (["stray"], ["'stray'"]),
        (["--chunk-size"], ["--chunk-size", "expected"]),
    ],
)
def test_a_wrong_command_line_names_value_place_and_remedy(argv, words):
    text = failure(PrefillConfig, *argv)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[prefil]\n", ["[prefil]", "did you mean [prefill]"]),
        ("[prefill]\nchunk_sise = 1\n", ["[prefill]", "'chunk_sise'", "did you mean 'chunk_size'"]),
        ("[router]\nprot = 1\n", ["[router]", "'prot'"]),
        ("[prefill]\nchunk_size = '1'\n", ["[prefill]", "chunk_size", "str", "whole number"]),
        ("[prefill]\nchunk_size = true\n", ["chunk_size", "bool", "whole number"]),
        ("[prefill]\nchunk_size = -4\n", ["baton.toml", "chunk_size", "-4"]),
        ("[prefill]\nconfig = 'x'\n", ["'config'"]),
        ("chunk_size = 1\n", ["chunk_size", "outside of a table"]),
        ("[prefill\n", ["not valid TOML"]),
    ],
)
def test_a_wrong_file_names_table_key_and_remedy(toml, text, words):
    message = failure(PrefillConfig, "--config", toml(text))
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["spec_steps", "spec_topk", "max_running"])
def test_m2_1_a_prefill_worker_asked_for_decode_graphs_says_it_has_none(toml, name, caplog):
    words = (
        "; it is a setting of `baton decode`, and a prefill worker decodes nothing and owns no decode graphs"
    )
    flag, variable = f"--{name.replace('_', '-')}", f"BATON_PREFILL_{name.upper()}"
    assert f"unknown argument '{flag}'{words}" in failure(PrefillConfig, "--graphs", "on", flag, "4")
    message = failure(PrefillConfig, "--config", toml(f"[prefill]\ngraphs = true\n{name} = 4\n"))
    assert f"table [prefill]: unknown key '{name}'{words}" in message
    load(PrefillConfig, env={"BATON_PREFILL_MODEL": "m", variable: "4"})
    assert f"{variable} is no setting of baton and is ignored{words}" in caplog.text
    assert "; it is a setting of `baton prefill`" in failure(DecodeConfig, "--chunk-size", "4")


def test_up_names_the_place_of_a_setting_of_its_children():
    words = "which `up` starts with what --config FILE has under [router] and [prefill]"
    assert words in failure(UpConfig, "--max-queue", "4")


def test_a_wrong_variable_names_itself():
    text = failure(PrefillConfig, env={"BATON_PREFILL_LEASE_S": "soon"})
    assert "BATON_PREFILL_LEASE_S" in text
    assert "'soon'" in text


def test_an_unknown_variable_is_warned_of_once_and_others_are_not(caplog):
    with caplog.at_level(logging.WARNING):
        load(PrefillConfig, env={"BATON_PREFILL_CHUNKSIZE": "1", "BATON_DECODE_PAGES": "1", "HOME": "/"})
    assert [r.getMessage() for r in caplog.records] == [
        "environment variable BATON_PREFILL_CHUNKSIZE is no setting of baton and is ignored; "
        "did you mean BATON_PREFILL_CHUNK_SIZE?"
    ]


def test_a_missing_model_names_the_three_places_to_set_it():
    with pytest.raises(
        ConfigError, match=r"--model DIR, set BATON_ROUTER_MODEL, or put model = .* under \[router\]"
    ):
        load_config(RouterConfig, [], {})


def test_a_model_from_the_file_is_enough(toml):
    assert load_config(UpConfig, ["--config", toml("[up]\nmodel = 'x'\nlease_s = 2\n")], {}).lease_s == 2.0


def test_a_config_built_by_hand_is_checked_too():
    with pytest.raises(ConfigError, match="page_size: -1 is below"):
        PrefillConfig(model="m", page_size=-1)
    with pytest.raises(ConfigError, match="chunk_size"):
        PrefillConfig(model="m", chunk_size=1.5)


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(PrefillConfig).chunk_size = 3


def _values(cls):
    strategies = {}
    for name, field in settings_of(cls).items():
        described, kind = describe(field), types_of(cls)[name]
        low, high = described.minimum, described.maximum
        if described.choices:
            strategies[name] = st.sampled_from(described.choices)
        elif described.is_endpoint or described.is_list:
            strategies[name] = st.sampled_from(["tcp://10.0.0.1:1", "ipc:///tmp/x"])
        elif described.fault_of is not None:
            texts = ["auto", "zmq_blocks", "shm,zmq_blocks", "2,14,25", "https://a.example"]
            strategies[name] = st.sampled_from([text for text in texts if not described.fault_of(text)])
        elif kind is bool:
            strategies[name] = st.booleans()
        elif kind is int:
            strategies[name] = st.integers(int(low), int(high))
        elif kind is float:
            strategies[name] = st.floats(low, high)
        else:
            strategies[name] = st.text(min_size=1).map(lambda text: "m" + text)
    strategies.pop("config")
    for name in ("spec_tokens", "ngram_min", "ngram_max"):  # most values do not go with others
        strategies.pop(name, None)
    values = st.fixed_dictionaries({"model": strategies.pop("model")}, optional=strategies)

    def are_apart(v):
        ports = [v.get("port", 8000), *(v[name] for name in ("own_port", "probe_port") if v.get(name))]
        return len(set(ports)) == len(ports)

    return values.filter(are_apart)


@given(st.data())
def test_the_flags_of_a_config_build_the_same_config(data):
    cls = data.draw(st.sampled_from(ROLES))
    config = cls(**data.draw(_values(cls)))
    assert load_config(cls, to_argv(config), {}) == config


def test_flags_name_what_was_given_even_when_it_equals_the_default():
    config = load(PrefillConfig, "--chunk-size", "256")
    assert "--chunk-size=256" in to_argv(config)
    assert "--chunk-size=256" not in to_argv(load(PrefillConfig))


@pytest.mark.parametrize("cls", ROLES)
def test_help_shows_each_flag_once_with_its_default_and_exits_with_0(cls, capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(cls, ["--help"], {})
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    text = " ".join(printed.split())
    flags = [line.split()[0] for line in printed.splitlines() if line.startswith("  --")]
    assert sorted(flags) == sorted(f"--{name.replace('_', '-')}" for name in settings_of(cls))
    for field in settings_of(cls).values():
        if isinstance(field.default, int) and not isinstance(field.default, bool):
            assert f"(default {as_text(field.default, describe(field))}" in text


def test_cluster_modules_import_no_torch():
    code = (
        "import sys, baton.cluster.config.load, baton.cluster.process.log, baton.cluster.telemetry.metrics, "
        "baton.cluster.process.process, baton.cluster.net.control_link, baton.deploy.up.launcher, "
        "baton.__main__; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0


@pytest.mark.parametrize(
    ("cls", "flags", "words"),
    [
        (DecodeConfig, ["--spec-steps", "3"], ["--spec-steps", "--draft"]),
        (DecodeConfig, ["--spec-steps", "5", "--draft", "d", "--no-draft"], ["--spec-steps", "--no-draft"]),
        (DecodeConfig, ["--spec-topk", "2"], ["--spec-topk", "--draft"]),
        (DecodeConfig, ["--ngram-max", "4"], ["--ngram-max", "--draft ngram"]),
        (
            DecodeConfig,
            ["--ngram-max", "4", "--draft", "ngram", "--no-draft"],
            ["--ngram-max", "--no-draft"],
        ),
        (DecodeConfig, ["--ngram-min", "3", "--draft", "d"], ["--ngram-min", "--draft ngram"]),
        (
            DecodeConfig,
            ["--spec-adaptive", "on", "--draft", "d", "--no-draft"],
            ["--spec-adaptive", "--no-draft"],
        ),
        (DecodeConfig, ["--kv-memory-mb", "64", "--pages", "8"], ["--kv-memory-mb", "--pages"]),
        (PrefillConfig, ["--kv-memory-mb", "64", "--pages", "8"], ["--kv-memory-mb", "--pages"]),
        (PrefillConfig, ["--device", "cpu", "--gpu-memory-share", "0.5"], ["--gpu-memory-share", "no GPU"]),
        (
            RouterConfig,
            ["--queue-timeout-s", "60", "--request-timeout-s", "30"],
            ["--queue-timeout-s", "--request-"],
        ),
    ],
)
def test_a_setting_that_has_no_effect_beside_others_is_warned_of(cls, flags, words, caplog):
    with caplog.at_level(logging.WARNING):
        load_config(cls, ["--model", "m", *flags], {})
        load_config(cls, ["--model", "m", *flags], {"BATON_PARENT_PID": "1"})  # its launcher has said so
    assert len(caplog.records) == 1
    assert all(word in caplog.records[0].getMessage() for word in words)


@pytest.mark.parametrize(
    ("cls", "flags"),
    [
        (DecodeConfig, ["--draft", "d", "--spec-steps", "5"]),
        (DecodeConfig, ["--draft", "ngram", "--ngram-max", "4", "--spec-steps", "8"]),
        (DecodeConfig, ["--no-draft", "--draft", "d"]),
        (PrefillConfig, ["--pages", "8"]),
        (RouterConfig, ["--queue-timeout-s", "60", "--request-timeout-s", "0"]),
    ],
)
def test_settings_that_have_their_effect_are_not_warned_of(cls, flags, caplog):
    with caplog.at_level(logging.WARNING):
        load_config(cls, ["--model", "m", *flags], {})
    assert caplog.records == []


def test_a_worker_is_not_given_up_within_a_second():
    assert "1 s" in failure(RouterConfig, "--worker-timeout-s", "0.9")
    assert load_config(RouterConfig, ["--model", "m", "--worker-timeout-s", "1"], {}).worker_timeout_s == 1.0


def test_transports_are_checked_and_reach_both_kinds_of_worker_through_up(tmp_path):
    assert "zmq_blocks" in failure(PrefillConfig, "--transports", "shm")
    assert "is no list of transports" in failure(UpConfig, "--transports", "carrier-pigeon")
    config = load(UpConfig, "--transports", "zmq_blocks", "--slab-mb", "8")
    children = dict(child_configs(config, {}, tmp_path))
    assert [children[name].transports for name in ("prefill-0", "decode-0")] == ["zmq_blocks"] * 2
    assert children["prefill-0"].slab_mb == 8


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--draft", "ngram", "--spec-topk", "2"], ["--spec-topk 2", "--draft ngram", "--spec-topk 1"]),
        (["--draft", "ngram", "--ngram-min", "6"], ["--ngram-min 6", "--ngram-max 5", "raise"]),
        (["--draft", "ngram", "--ngram-max", "17"], ["--ngram-max", "17", "16"]),
        (["--draft", "ngram", "--ngram-min", "0"], ["--ngram-min", "0", "1"]),
        (["--draft", "ngram", "--ngram-window", "8"], ["--ngram-window", "8", "32"]),
    ],
)
def test_sizes_of_lookup_that_cannot_be_are_refused_with_the_remedy(flags, words):
    with pytest.raises(ConfigError) as refused:
        load_config(DecodeConfig, ["--model", "m", *flags], {})
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_tree_is_allowed_where_lookup_is_switched_off():
    flags = ["--model", "m", "--draft", "ngram", "--no-draft", "--spec-topk", "2"]
    assert load_config(DecodeConfig, flags, {}).spec_topk == 2


def test_both_names_of_lookup_are_the_same_word():
    assert LOOKUP == NGRAM
    defaults, config = DecodeConfig(model="m"), EngineConfig(model="m")
    for name in ("ngram_min", "ngram_max", "ngram_window"):
        assert getattr(defaults, name) == getattr(config, name)
    sizes = {"shortest": config.ngram_min, "longest": config.ngram_max, "window": config.ngram_window}
    assert sizes == NGRAMS


@pytest.mark.parametrize(
    ("model", "served", "names"),
    [
        ("/models/some", "", ("some",)),
        ("./org/some", "", ("some",)),
        ("org/some", "", ("some", "org/some")),
        ("org/some", "a", ("a",)),
        ("/models/some", "a, b,org/some,", ("a", "b", "org/some")),
    ],
)
def test_a_model_has_the_names_that_clients_use(model, served, names):
    config = DecodeConfig(model=model, served_model=served)
    assert (config.served_names, config.served_name) == (names, names[0])
