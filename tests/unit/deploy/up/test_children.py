"""The settings of `baton up` for its children: endpoints, four sources of values, paths, threads."""

import logging
import os
import socket
from pathlib import Path

import pytest
from baton.cluster.config.load import COMMAND_LINE, FILE, ignored_settings, load_config
from baton.cluster.config.roles import DecodeConfig, PrefillConfig, RouterConfig, UpConfig
from baton.cluster.config.tier_checks import check_tiers
from baton.cluster.errors import ConfigError, StartupError
from baton.deploy.capacity.worker_sizes import need_of
from baton.deploy.up import children
from baton.deploy.up.children import (
    child_configs,
    child_environment,
    child_specs,
    free_port,
    role_configs,
    wish_of,
)
from baton.deploy.up.dealing import deal
from baton.deploy.up.gpu_list import Gpu
from baton.deploy.up.launcher import Cluster


def told(config, env=None):
    """The config that each child ends up with, by name."""
    env, run = env or {}, Path("/run/x")
    specs = child_specs(child_configs(config, env, run), config, env, run, lambda role, flags: [role, *flags])
    classes = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
    return {spec.name: load_config(classes[spec.role], spec.argv[1:], {}) for spec in specs}


def test_endpoints_agree_between_the_children():
    for transport in ("ipc", "tcp"):
        configs = told(UpConfig(model="m", prefill=2, decode=2, transport=transport))
        assert list(configs) == ["router", "prefill-0", "prefill-1", "decode-0", "decode-1"]
        control = configs["router"].control_bind
        assert {child.router for name, child in configs.items() if name != "router"} == {control}
        assert control.startswith(f"{transport}://")
        binds = [configs["prefill-0"].kv_bind, configs["prefill-1"].kv_bind]
        assert transport == "tcp" or len(set(binds)) == 2


def test_each_decode_worker_has_an_address_for_prefixes_if_it_offers_any():
    binds = {
        name: child.prefix_bind
        for name, child in told(UpConfig(model="m", decode=2, transport="ipc")).items()
        if isinstance(child, DecodeConfig)
    }
    assert binds == {f"decode-{i}": f"ipc:///run/x/prefix-{i}" for i in range(2)}
    default = DecodeConfig(model="m").prefix_bind
    assert told(UpConfig(model="m", transport="tcp"))["decode-0"].prefix_bind == default
    assert told(UpConfig(model="m", offer_prefixes=False))["decode-0"].prefix_bind == default
    assert told(UpConfig(model="m", prefix_pulls="off"))["router"].prefix_pulls == "off"


def test_settings_of_up_reach_the_children_that_know_them():
    configs = told(
        UpConfig(model="m", chunk_size=64, spec_steps=2, no_draft=True, lease_s=2.5, prefix_cache=False)
    )
    assert configs["prefill-0"].chunk_size == 64
    assert configs["decode-0"].spec_steps == 2
    assert configs["decode-0"].no_draft
    assert (configs["prefill-0"].lease_s, configs["prefill-0"].prefix_cache) == (2.5, False)


def test_lookup_stays_a_word_for_children_in_another_directory(tmp_path, monkeypatch):
    """Directories are made absolute; a directory of that name would be written ./ngram."""
    monkeypatch.chdir(tmp_path)
    for name in ("m", "ngram"):
        (tmp_path / name).mkdir()
    configs = told(UpConfig(model="m", draft="ngram", ngram_max=4))
    assert {configs[name].draft for name in ("prefill-0", "decode-0")} == {"ngram"}
    assert configs["decode-0"].ngram_max == 4
    assert told(UpConfig(model="m", draft="./ngram"))["decode-0"].draft == str(tmp_path / "ngram")


def test_a_roles_own_table_beats_ups_table_and_ups_command_line_beats_both(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        "[up]\nkv_memory_mb = 100\nlease_s = 9\n"
        "[decode]\nkv_memory_mb = 200\nmax_running = 3\n"
        "[router]\nmax_queue = 5\n"
    )
    base = ["--model", "m", "--config", str(path)]
    config = load_config(UpConfig, base, {})
    assert config.explicit["kv_memory_mb"] == FILE
    configs = told(config)
    assert (configs["prefill-0"].kv_memory_mb, configs["decode-0"].kv_memory_mb) == (100, 200)
    assert (configs["decode-0"].max_running, configs["decode-0"].lease_s, configs["router"].max_queue) == (
        3,
        9,
        5,
    )
    config = load_config(
        UpConfig, [*base, "--kv-memory-mb", "1024"], {}
    )  # the default, and still the user's word
    assert config.explicit["kv_memory_mb"] == COMMAND_LINE
    assert told(config)["decode-0"].kv_memory_mb == 1024


def test_a_roles_own_variable_reaches_it_through_flags_alone():
    env = {"BATON_DECODE_MAX_RUNNING": "2", "PATH": "/bin"}
    assert told(UpConfig(model="m"), env)["decode-0"].max_running == 2
    child = child_environment(env, 3)
    assert [name for name in child if name.startswith("BATON_")] == ["BATON_PARENT_PID"]
    assert (child["OMP_NUM_THREADS"], child["OMP_WAIT_POLICY"], child["PATH"]) == ("3", "passive", "/bin")


def test_all_workers_keep_the_pages_behind_windows_if_one_has_tiers(tmp_path):
    """Workers of the two kinds would not pair."""
    path = tmp_path / "c.toml"
    path.write_text("[prefill]\nhost_cache_gib = 0.001\n")
    tiered = load_config(UpConfig, ["--model", "m", "--config", str(path)], {})
    configs = told(tiered)
    assert {configs[name].window_kv for name in ("prefill-0", "decode-0")} == {"keep"}
    assert [worker.window_kv for worker in role_configs(tiered, {})] == ["keep", "keep"]
    configs = told(UpConfig(model="m"))
    assert {configs[name].window_kv for name in ("prefill-0", "decode-0")} == {"auto"}
    with pytest.raises(ConfigError, match="--host-cache-gib keeps whole pages; leave out --window-kv free"):
        check_tiers(PrefillConfig(model="m", host_cache_gib=0.001, window_kv="free"))


def test_a_port_of_0_in_the_routers_own_table_is_any_free_one(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[router]\nport = 0\nhost = '::1'\ntrusted_network = true\n")
    base = ["--model", "m", "--config", str(path)]
    router = told(load_config(UpConfig, base, {}))["router"]
    assert router.host == "::1"
    assert router.port not in (0, 8000)
    assert told(load_config(UpConfig, [*base, "--port", "8123"], {}))["router"].port == 8123


def test_a_chosen_port_lies_outside_of_the_systems_ephemeral_range(tmp_path, monkeypatch):
    lowest = int(children.GIVEN_PORTS.read_text().split()[0])
    assert all(children.LOWEST_PORT <= free_port(host) < lowest for host in ("127.0.0.1", "::1") * 4)
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "range").write_text(f"{port + 1} {port + 9}")
        monkeypatch.setattr(children, "LOWEST_PORT", port)
        monkeypatch.setattr(children, "GIVEN_PORTS", tmp_path / "range")
        assert free_port("127.0.0.1") > lowest, "its own only one is taken"
    with pytest.raises(StartupError, match="choose another --host"):
        free_port("192.0.2.1")


def test_symbolic_links_in_paths_are_not_resolved(tmp_path, monkeypatch):
    (tmp_path / "0123abcd").mkdir()
    (tmp_path / "name").symlink_to("0123abcd")
    monkeypatch.chdir(tmp_path)
    assert told(UpConfig(model="name"))["router"].model == str(tmp_path / "name")


H200S = [Gpu(index=index, name="NVIDIA H200", memory=140 << 30, capability=(9, 0)) for index in ("0", "4")]


@pytest.fixture(scope="module")
def dealt(toy_checkpoint):
    """The environment and the config of each child when its GPU was dealt to it."""
    need = need_of(toy_checkpoint("llama"))

    def dealt(config, gpus=H200S, env=None):
        env, run = env or {}, Path("/run/x")
        settled = deal(gpus, need, wish_of(config))
        configs = child_configs(config, env, run, settled)
        specs = child_specs(configs, config, env, run, lambda role, flags: [role, *flags], settled)
        return {spec.name: spec.env for spec in specs}, dict(configs)

    return dealt


def test_each_role_has_the_model_and_device_of_its_own_table(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[prefill]\ndevice = "cpu"\n[decode]\nmodel = "other"\nspec_steps = 1\n')
    config = load_config(UpConfig, [f"--config={path}"], {"BATON_UP_MODEL": "m"})
    prefill, decode = role_configs(config, {})
    assert (prefill.device, prefill.model) == ("cpu", "m")
    assert (decode.device, decode.model, decode.spec_steps) == ("auto", "other", 1)


def test_each_worker_sees_its_own_gpu_only_and_the_router_all(dealt):
    environments, _ = dealt(UpConfig(model="m"), env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    visible = {name: env.get("CUDA_VISIBLE_DEVICES") for name, env in environments.items()}
    assert visible == {"router": None, "prefill-0": "0", "decode-0": "4"}


def test_a_worker_counts_gpus_as_up_counted_them(dealt):
    environments, _ = dealt(UpConfig(model="m"))
    assert environments["decode-0"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    environments, _ = dealt(UpConfig(model="m"), env={"CUDA_VISIBLE_DEVICES": "0,4"})
    assert environments["decode-0"]["CUDA_VISIBLE_DEVICES"] == "4"
    assert "CUDA_DEVICE_ORDER" not in environments["decode-0"], "the user's numbers are in the user's order"


def test_without_gpus_no_environment_names_one():
    env, run, config = {"CUDA_VISIBLE_DEVICES": "2"}, Path("/run/x"), UpConfig(model="m")
    specs = child_specs(child_configs(config, env, run), config, env, run, lambda role, flags: [role, *flags])
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["2"] * 3
    assert not any("CUDA_DEVICE_ORDER" in spec.env for spec in specs)


def test_a_cluster_without_a_decode_worker_is_refused():
    with pytest.raises(ConfigError, match="decode: 0 is below the smallest allowed, 1"):
        UpConfig(model="m", decode=0)


def test_without_prefill_workers_decode_computes_prompts_itself(dealt):
    configs = told(UpConfig(model="m", prefill=0, decode=2))
    assert list(configs) == ["router", "decode-0", "decode-1"]
    assert configs["decode-0"].aggregated
    assert not told(UpConfig(model="m"))["decode-0"].aggregated
    _, configs = dealt(UpConfig(model="m"), H200S[:1])
    assert list(configs) == ["router", "decode-0"]
    assert configs["decode-0"].aggregated


def test_decode_cannot_be_kept_from_prompts_that_nobody_else_computes(dealt):
    config = load_config(UpConfig, ["--model=m", "--prefill=0", "--aggregated=off"], {})
    with pytest.raises(ConfigError, match="--aggregated off: no prefill worker starts"):
        told(config)
    config = load_config(UpConfig, ["--model=m", "--aggregated=off"], {})
    with pytest.raises(ConfigError, match="write --prefill 1"):
        dealt(config, H200S[:1])
    assert not told(config)["decode-0"].aggregated


def test_workers_that_share_a_gpu_are_told_their_share(dealt, tmp_path):
    _, configs = dealt(UpConfig(model="m", prefill=1, decode=1), H200S[:1])
    shares = [configs[name].gpu_memory_share for name in ("prefill-0", "decode-0")]
    assert all(shares)
    assert 0.89 < sum(shares) < 0.901
    _, configs = dealt(UpConfig(model="m", prefill=1, decode=1, gpu_memory_share=0.6), H200S[:1])
    assert 0.59 < sum(configs[name].gpu_memory_share for name in ("prefill-0", "decode-0")) < 0.601
    _, configs = dealt(UpConfig(model="m", gpu_memory_share=0.6))
    assert [configs[name].gpu_memory_share for name in ("prefill-0", "decode-0")] == [0.6, 0.6]
    path = tmp_path / "c.toml"
    path.write_text("[decode]\ngpu_memory_share = 0.3\n")
    _, configs = dealt(UpConfig(model="m", prefill=1, decode=1, config=str(path)), H200S[:1])
    assert configs["decode-0"].gpu_memory_share == 0.3


def test_a_setting_that_does_nothing_for_a_child_is_warned_of_once(tmp_path, caplog):
    path = tmp_path / "c.toml"
    path.write_text("[prefill]\npages = 8\n")
    with caplog.at_level(logging.WARNING):
        told(UpConfig(model="m", config=str(path), kv_memory_mb=64, spec_steps=5, prefill=2, decode=2))
    assert sorted(record.getMessage() for record in caplog.records if record.name == children.__name__) == [
        "--kv-memory-mb is ignored: --pages sets the size of the KV pool",
        "--spec-steps is ignored: nothing drafts without a head, name one with --draft",
    ]


def test_threads_are_divided_among_the_workers_of_a_role():
    cores = len(os.sched_getaffinity(0))
    assert told(UpConfig(model="m"))["decode-0"].threads == cores
    assert told(UpConfig(model="m", prefill=cores, decode=1))["decode-0"].threads == 1
    assert told(UpConfig(model="m", threads=7))["prefill-0"].threads == 7
    assert told(UpConfig(model="m"), {"OMP_NUM_THREADS": "5"})["prefill-0"].threads == 5


def test_paths_are_absolute_for_children_and_hub_ids_stay(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert told(UpConfig(model="here"))["router"].model == str(tmp_path / "here")
    assert told(UpConfig(model="org/name"))["router"].model == "org/name"


def test_a_wrong_value_for_a_child_is_refused_before_any_start(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[decode]\nmax_running = -1\n")
    cluster = Cluster(UpConfig(model="m", config=str(path)), env={"XDG_RUNTIME_DIR": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"\[decode\], key 'max_running'"):
        cluster.start()
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.toml"]


def bulk_ports_of(directory, *flags):
    config = load_config(UpConfig, ["--model=x", "--prefill=3", *flags], {})
    children = child_configs(config, {}, directory)
    return [child.kv_bulk_port for _, child in children if isinstance(child, PrefillConfig)]


def test_prefill_workers_of_one_host_never_share_a_bulk_port(tmp_path, caplog):
    keyed = ["--transport=tcp", f"--keys={tmp_path}"]
    assert bulk_ports_of(tmp_path, *keyed) == [0, 0, 0]
    assert bulk_ports_of(tmp_path, *keyed, "--kv-bulk-port=7300") == [7300, 7301, 7302]
    assert bulk_ports_of(tmp_path, *keyed, "--kv-bulk-port=65533") == [65533, 65534, 65535]
    assert "--kv-bulk-port" not in caplog.text
    with pytest.raises(ConfigError, match="65534 leaves no port for prefill-2"):
        bulk_ports_of(tmp_path, *keyed, "--kv-bulk-port=65534")


def test_an_unused_bulk_port_is_warned_of(tmp_path, caplog):
    bulk_ports_of(tmp_path, f"--keys={tmp_path}", "--kv-bulk-port=7300")
    bulk_ports_of(tmp_path, "--transport=tcp", "--kv-bulk-port=7300")
    assert caplog.text.count("--kv-bulk-port is ignored") == 2


def test_workers_of_a_role_never_share_a_metrics_port(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[prefill]\nmetrics_port = 9100\n[decode]\nmetrics_port = 9200\n")
    config = load_config(UpConfig, ["--model=x", "--prefill=2", "--decode=2", f"--config={file}"], {})
    ports = {
        name: getattr(child, "metrics_port", None) for name, child in child_configs(config, {}, tmp_path)
    }
    assert ports == {"router": None, "prefill-0": 9100, "prefill-1": 9101, "decode-0": 9200, "decode-1": 9201}
    file.write_text("[decode]\nmetrics_port = 9200\ndp_attention = 4\n")  # each rank has one, too
    children = child_configs(config_of(tmp_path, file), {}, tmp_path)
    assert [child.metrics_port for _, child in children if isinstance(child, DecodeConfig)] == [9200, 9204]


def config_of(tmp_path, file):
    return load_config(UpConfig, ["--model=x", "--decode=2", f"--config={file}"], {})


def test_of_several_routers_the_first_one_exports_the_series_of_workers(tmp_path):
    def shown(*flags):
        config = load_config(UpConfig, ["--model=x", *flags], {})
        children = child_configs(config, {}, tmp_path)
        return [child.worker_metrics for _, child in children if isinstance(child, RouterConfig)]

    assert shown() == ["auto"]
    assert shown("--routers=3") == ["auto", "none", "none"]
    assert shown("--routers=3", "--worker-metrics=all") == ["all", "all", "all"], "as asked"


def own_ports_of(directory, *flags, env=None):
    config = load_config(UpConfig, ["--model=x", "--port=8000", *flags], {})
    children = child_configs(config, env or {}, directory)
    return [child.own_port for _, child in children if isinstance(child, RouterConfig)]


def test_each_of_several_routers_has_its_own_port_and_one_only_if_asked(tmp_path):
    assert own_ports_of(tmp_path) == [0]
    assert own_ports_of(tmp_path, "--own-port=8001") == [8001]
    assert own_ports_of(tmp_path, "--own-port=8001", "--routers=3") == [8001, 8002, 8003]
    assert own_ports_of(tmp_path, "--routers=2", env={"BATON_ROUTER_OWN_PORT": "8001"}) == [8001, 8002]
    chosen = own_ports_of(tmp_path, "--routers=4")
    assert len({*chosen, 0, 8000}) == 6


def test_several_routers_divide_the_limits_of_keys_unless_told_otherwise(tmp_path):
    def parts_of(*flags):
        config = load_config(UpConfig, ["--model=x", "--port=8000", *flags], {})
        made = [child for _, child in child_configs(config, {}, tmp_path) if isinstance(child, RouterConfig)]
        return [router.limit_parts for router in made]

    assert parts_of() == [0]
    assert parts_of("--routers=3") == [3, 3, 3]
    assert parts_of("--routers=2", "--limit-parts=1") == [1, 1]


def test_each_of_several_routers_has_its_own_port_of_probes(tmp_path):
    def ports_of(*flags):
        config = load_config(UpConfig, ["--model=x", "--port=8000", *flags], {})
        made = [child for _, child in child_configs(config, {}, tmp_path) if isinstance(child, RouterConfig)]
        return [router.probe_port for router in made]

    assert ports_of("--routers=2") == [0, 0]
    assert ports_of("--routers=3", "--probe-port=8101") == [8101, 8102, 8103]
    with pytest.raises(ConfigError, match="--probe-port 8000 is the --port of the clients; choose another"):
        ports_of("--probe-port=8000")
    with pytest.raises(ConfigError, match="--probe-port 8101 is the --own-port; choose another"):
        ports_of("--probe-port=8101", "--own-port=8101")


def test_a_chosen_port_is_assigned_only_once(tmp_path, monkeypatch):
    def routers(chosen, *flags):
        free = iter(chosen)
        monkeypatch.setattr(children, "free_port", lambda host: next(free))
        config = load_config(UpConfig, ["--model=x", "--port=0", "--routers=2", *flags], {})
        made = [child for _, child in child_configs(config, {}, tmp_path) if isinstance(child, RouterConfig)]
        return [(router.port, router.own_port) for router in made]

    assert routers([8002, 8003, 8004], "--own-port=8001") == [(8003, 8001), (8003, 8002)]
    assert routers([8002, 8009, 8002, 8004, 8004, 8005]) == [(8002, 8004), (8002, 8005)]


@pytest.mark.parametrize("first", [8000, 7999])
def test_an_own_port_equal_to_the_client_port_is_refused_before_any_start(tmp_path, first):
    with pytest.raises(ConfigError, match="--own-port 8000 is the --port of the clients"):
        own_ports_of(tmp_path, f"--own-port={first}", "--routers=2")
    with pytest.raises(ConfigError, match="--own-port 65535 leaves no port for router-1"):
        own_ports_of(tmp_path, "--own-port=65535", "--routers=2")


def test_a_metrics_address_without_a_port_is_warned_of():
    assert ignored_settings(DecodeConfig(model="x", metrics_host="127.0.0.2")) == [
        "--metrics-host is ignored: --metrics-port 0 opens no port"
    ]
