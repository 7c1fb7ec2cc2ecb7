"""The row in which small messages, which have no digest as blocks have, are damaged on plain links."""

import time

from baton.tests.faults.rows import row
from baton.tests.faults.rows_network import BLOCKS, COLD, finished, placed_again, told
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import Ask, Call, workload
from baton.tests.faults.zmtp_proxy import Way
from baton.tests.faults.zmtp_rules import Act, Emit, Holder, verb
from baton.tests.faults.zmtp_wire import Message

NUMBER_BYTES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # by the type byte of a MessagePack number
KV = (
    ("down", verb("Announce", final=True), "first_token"), ("down", verb("Block"), "size"), ("up",
    verb("Attach"), "have"),
    ("up", verb("Pull"), "block"),
)  # fmt: skip
REPORTS = (("prefill-0", "FirstToken", "token"), ("decode-0", "Tokens", "ids"))
ORDERS = (("prefill-1", "Prefill", "prompt_ids"), ("decode-1", "Reserve", "prompt_ids"))
AT_ONCE = 4  # requests while a control message is damaged: each lost report costs one an attempt at most


def lowest_bit(name: str) -> Act:
    """The first number under this name is one more or less: a valid message with a wrong number."""

    def act(way: Holder, message: Message) -> list[Emit]:
        data = bytearray(message.frames[0])
        key = bytes((0xA0 | len(name),)) + name.encode()
        data[_last_byte(data, data.index(key) + len(key))] ^= 1
        return [Emit(message.with_frame(0, bytes(data)).wire())]

    return act


def _last_byte(data: bytearray, at: int) -> int:
    """Where the number that begins at `at` ends, or the first one of the list."""
    if 0x90 <= data[at] <= 0x9F:
        return _last_byte(data, at + 1)
    if data[at] == 0xDC:
        return _last_byte(data, at + 3)
    return at + NUMBER_BYTES.get(data[at], 0)


def under_another_first_token(scene: Scene) -> list[Call]:
    """Calls whose decode gets another token 1 than was sampled, resent for half a second."""
    asks = scene.known(workload(335, 6, **BLOCKS))
    is_final = verb("Announce", final=True)
    until: dict[str, float] = {}  # by room

    def is_early(message: Message) -> bool:
        return is_final(message) and time.monotonic() < until.setdefault(
            message.fields()["room"], time.monotonic() + 0.5
        )

    rule = scene.cluster.kv["prefill-0"].down.rule(is_early, lowest_bit("first_token"))
    calls = finished(scene, scene.traffic.start(*asks))
    assert rule.num_done, "an announcement went that way"
    return calls


@row(
    "F33c", "one bit is flipped in numbers of Announce, Block, Attach, Pull, FirstToken, Tokens, Prefill and "
            "Reserve",
    "each is dropped; what it was about is said again, a worker's report costs one attempt of its rooms; "
    "tokens equal",
    **COLD,
)  # fmt: skip
def f33c(scene: Scene) -> str:
    asks = scene.known(workload(334, 12, **BLOCKS))
    proxy = scene.cluster.kv["prefill-0"]
    rules = [getattr(proxy, way).rule(when, lowest_bit(name), times=1) for way, when, name in KV]
    calls = finished(scene, scene.traffic.start(*asks))
    assert not placed_again(calls), f"the sessions ask again by themselves: {told(calls)}"
    assert [rule.num_done for rule in rules] == [1] * len(KV), "each went that way"
    for role in ("decode", "prefill"):
        scene.until_counted(role, "malformed", least=2)
    for node, name, field in ORDERS:
        ordered = while_damaged(scene, scene.cluster.control[node].down, name, field, asks)
        assert not placed_again(ordered), f"{name} is said again: {told(ordered)}"
        calls += ordered
    for node, name, field in REPORTS:
        reported = while_damaged(scene, scene.cluster.control[node].up, name, field, asks)
        assert all(call.attempts <= 2 for call in reported), (
            f"{name} costs an attempt at most: {told(reported)}"
        )
        calls += reported
    found = scene.cluster.status()["router"]["events"]
    assert (found["damaged_order"], found["damaged_message"]) == (len(ORDERS), len(REPORTS))
    assert found["worker_dropped_rooms"] == len(REPORTS)
    assert scene.counted("decode", "digest_mismatches") == 0, "none was taken for what it was not"
    dropped = f"{len(KV)} messages of the KV plane, {len(ORDERS)} orders and {len(REPORTS)} reports dropped"
    return f"{told(calls)}; {dropped}"


def while_damaged(scene: Scene, way: Way, name: str, field: str, asks: list[Ask]) -> list[Call]:
    """Calls with one damaged message of this type; afterwards all workers are registered again.

    A prompt goes where its like was, so that few may go to one worker: others follow until one has.
    """
    rule = way.rule(lambda message: name in message.types(), lowest_bit(field), times=1)
    calls: list[Call] = []
    for begin in range(0, len(asks), AT_ONCE):
        calls += finished(scene, scene.traffic.start(*asks[begin : begin + AT_ONCE]))
        scene.cluster.wait_whole(10)
        if rule.num_done:
            return calls
    raise AssertionError(f"no {name} went that way")
