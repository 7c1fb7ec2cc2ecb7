"""The settings that a worker takes along into its other role, and the orders that it takes."""

import pytest
from baton.cluster.config.load import load_config
from baton.cluster.config.roles import DecodeConfig, PrefillConfig
from baton.cluster.protocol.messages import CHANGING_ROLE, ChangeRole
from baton.worker.role_change import RoleChange, argv_as, settings_fault

FLAGS = ["--model=/m", "--router=tcp://127.0.0.1:1", "--threads=2"]


def order(number, role="decode"):
    return ChangeRole(instance="a" * 32, order=f"{number:032x}", role=role, drain_ms=0)


def test_the_other_role_gets_the_settings_that_both_have():
    config = load_config(PrefillConfig, [*FLAGS, "--max-queue=9", "--kv-bind=tcp://127.0.0.1:5"], {})
    found = load_config(DecodeConfig, argv_as(config, "decode", {}), {})
    assert (found.model, found.router, found.threads) == ("/m", "tcp://127.0.0.1:1", 2)


def test_variables_and_table_of_the_new_role_win_over_the_former_ones(tmp_path):
    path = tmp_path / "baton.toml"
    path.write_text('[prefill]\npage_size = 8\nlog_level = "debug"\n[decode]\npage_size = 32\nthreads = 3\n')
    env = {"BATON_DECODE_MAX_RUNNING": "5", "BATON_DECODE_WATCHDOG_S": "40", "BATON_PREFILL_WATCHDOG_S": "50"}
    config = load_config(PrefillConfig, ["--model=/m", f"--config={path}", "--threads=2"], env)
    found = load_config(DecodeConfig, argv_as(config, "decode", env), env)
    assert (found.max_running, found.watchdog_s, found.page_size) == (5, 40, 32)
    assert (found.threads, found.log_level) == (2, "debug")


def test_settings_that_the_other_role_would_refuse_are_a_fault():
    config = load_config(PrefillConfig, FLAGS, {})
    assert settings_fault(config, "decode", {}) == ""
    fault = settings_fault(config, "decode", {"BATON_DECODE_MAX_RUNNING": "many"})
    assert "BATON_DECODE_MAX_RUNNING" in fault


def test_a_worker_takes_one_order_and_reports_it():
    change, taken = RoleChange("prefill"), []
    change.check, change.on_order = lambda role: "", taken.append
    change.take(order(1, "prefill"))
    assert (taken, change.state) == ([], "")
    for number in (2, 2, 3):
        change.take(order(number))
    assert ([each.order for each in taken], change.state) == ([order(2).order], CHANGING_ROLE)


@pytest.mark.parametrize("fault", ["no head"])
def test_a_refused_order_leaves_the_worker_in_its_role(fault):
    change, taken = RoleChange("prefill"), []
    change.check, change.on_order = lambda role: fault, taken.append
    change.take(order(1))
    assert (taken, change.state, change.fault) == ([], "", fault)
    change.check = lambda role: ""
    change.take(order(2))
    assert (len(taken), change.fault) == (1, "")
