"""A tiny tokenizer, scripted workers that speak the real control plane, and a router in a thread."""

import asyncio
import atexit
import contextlib
import functools
import gc
import http.client
import json
import secrets
import threading
import time
from pathlib import Path

import httpx
import uvloop
import zmq
from baton.cluster.config.roles import RouterConfig
from baton.cluster.net.sockets import connect, make_socket, recv_parts, try_send
from baton.cluster.protocol.codec import control_down_decoder, encode, framed, pack
from baton.cluster.protocol.messages import (
    PROTOCOL_MAJOR,
    YOUNG_FIELDS,
    Cancel,
    DecodeTimeline,
    Finished,
    FirstToken,
    Gone,
    Heartbeat,
    Hello,
    Prefill,
    PrefillTimeline,
    Reserve,
    Reserved,
    TokenItem,
    TokenLogprob,
    Tokens,
    Welcome,
    WorkerStats,
)
from baton.router.app import Router
from baton.router.errors import bad_request
from baton.router.rooms.effects import Timeouts
from baton.router.sandbox.fork_server import ForkServer
from baton.router.sandbox.frames import RENDERED
from baton.router.sandbox.template_renderer import TemplateRenderer
from baton.router.text.templates import encoded
from baton.router.text.tokenizer import load_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'refuse me' %}{{ raise_exception('roles must alternate') "
    "}}{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER = "Hello wörld 😀! This is the answer; it goes on for a while, and then it ends."
MODEL = "tiny"
# of a router whose limits are not what is tested: a thread that gets no core for a while is not a dead worker
PATIENCE = Timeouts(reserve_s=30.0, first_token_s=30.0, token_s=30.0, gone_s=30.0, accounts_s=30.0)
LITTLE_PATIENCE = Timeouts(reserve_s=0.3, first_token_s=1.5, token_s=1.0, gone_s=0.5)
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}


def save_tokenizer(directory: Path, *, template: bool = True) -> Path:
    """A byte-level BPE tokenizer with special tokens 0..2."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, this is the answer and it ends there"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    if template:
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


class FakeWorker:
    """Speaks the control plane from its own thread; `script(worker, message)` answers, `received` records."""

    def __init__(self, endpoint, role, script, **hello):
        self.instance = secrets.token_hex(16)
        self.role = role
        self.received = []
        self.stats = WorkerStats(pages_total=64, pages_free=64)
        self.beats = True
        self.num_beats = 0
        fields = {
            "fingerprint": "f" * 8,
            "model": MODEL,
            "kv_endpoint": "ipc:///nowhere" if role == "prefill" else "",
            "pages_total": 64,
            "page_size": 16,
            "max_context": 512,
            "max_running": 32,
            "vocab_size": 400,
            "takes": YOUNG_FIELDS,
            "protocol": PROTOCOL_MAJOR,
        }
        self.hello = Hello(role=role, instance=self.instance, **(fields | hello))
        self._endpoint = endpoint
        self._script = script
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._outbox = []
        self._lock = threading.Lock()
        self.welcomed = threading.Event()
        self.lost = threading.Event()  # the connection to the router ended once
        self._thread.start()

    def send(self, *messages, together=False):
        frames = [messages] if together else [(message,) for message in messages]
        with self._lock:
            self._outbox += [framed([pack(message) for message in frame]) for frame in frames]

    def of(self, kind):
        return [message for message in list(self.received) if isinstance(message, kind)]

    def close(self):
        """Vanishes without a word."""
        self._stop.set()
        self._thread.join()

    def _run(self):
        context = zmq.Context()
        socket = make_socket(context, zmq.DEALER)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connect(socket, self._endpoint)
        decoder = control_down_decoder()
        next_beat = 0.0
        while not self._stop.is_set():
            socket.poll(5)
            if monitor.poll(0):
                monitor.recv_multipart()
                self.lost.set()
            while parts := recv_parts(socket, 1, 1 << 20):
                message = decoder.decode(parts[0])
                self.received.append(message)
                if isinstance(message, Welcome):
                    self.welcomed.set()
                    next_beat = 0.0
                else:
                    self._script(self, message)
            with self._lock:
                while self._outbox and try_send(socket, [self._outbox[0]]):
                    self._outbox.pop(0)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + 0.1
                beat = Heartbeat(instance=self.instance, stats=self.stats)
                if not self.welcomed.is_set() or self.beats:
                    is_told = try_send(socket, [encode(beat if self.welcomed.is_set() else self.hello)])
                    self.num_beats += is_told and self.welcomed.is_set()
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
        context.term()


class Script:
    """Well-behaved workers that answer with `output` tokens, `step` per message."""

    def __init__(self, output, step=3):
        self.output = output
        self.step = step
        self.finish = "stop"
        self.holds = threading.Event()  # while set, decode sends nothing after Reserved

    def outputs(self, sampling):
        return self.output[: sampling.max_new_tokens]

    def prefill(self, worker, message):
        if isinstance(message, Prefill):
            ids = self.outputs(message.sampling)
            timeline = PrefillTimeline(
                prefill_ms=2.0, prompt_tokens=len(message.prompt_ids), cached_tokens=16
            )
            worker.send(
                FirstToken(
                    room=message.room,
                    epoch=message.epoch,
                    instance=worker.instance,
                    token=ids[0],
                    logprob=self.logprobs(ids[:1], message.sampling)[0]
                    if message.sampling.logprobs >= 0
                    else None,
                    finish="length" if len(ids) == 1 else "",
                    timeline=timeline,
                )
            )
        elif isinstance(message, Cancel):
            worker.send(Gone(room=message.room, epoch=message.epoch, instance=worker.instance))

    def decode(self, worker, message):
        if isinstance(message, Reserve):
            worker.send(Reserved(room=message.room, epoch=message.epoch, instance=worker.instance))
            if not self.holds.is_set():
                self.stream(worker, message)
        elif isinstance(message, Cancel):
            worker.send(Gone(room=message.room, epoch=message.epoch, instance=worker.instance))

    def stream(self, worker, reserve):
        """All tokens after the first, and the end."""
        ids = self.outputs(reserve.sampling)
        if len(ids) < 2:
            return
        for seq in range(1, len(ids), self.step):
            part = ids[seq : seq + self.step]
            logprobs = self.logprobs(part, reserve.sampling)
            item = TokenItem(room=reserve.room, epoch=reserve.epoch, seq=seq, ids=part, logprobs=logprobs)
            worker.send(Tokens(instance=worker.instance, items=[item]))
        worker.send(
            Finished(
                room=reserve.room,
                epoch=reserve.epoch,
                instance=worker.instance,
                reason="length" if len(ids) == reserve.sampling.max_new_tokens else self.finish,
                output_tokens=len(ids),
                timeline=DecodeTimeline(
                    verify_steps=10, drafted_tokens=30, accepted_tokens=12, handoff_bytes=4096
                ),
            )
        )

    def logprobs(self, ids, sampling):
        if sampling.logprobs < 0:
            return []
        top = [(4 + k, -1.0 - k) for k in range(sampling.logprobs)]
        return [TokenLogprob(logprob=-0.5, top=top) for _ in ids]


@functools.cache
def shared_fork_server():
    """One for all routers of this process; it ends with it."""
    handle = ForkServer()
    atexit.register(handle.close)
    return handle


def encode_chat(tokenizer, messages, switches=None, tools=()):
    """A chat's ids, rendered in this process."""
    guarded = tokenizer.guard(messages, switches, tools)
    reply = TemplateRenderer(tokenizer.template_setup).answer(encoded(guarded.chat))
    if reply[:1] != RENDERED:
        raise bad_request(reply[1:].decode())
    return tokenizer.encode_rendered(guarded, reply[1:].decode())


class RunningRouter:
    """A router on an event loop in a thread."""

    def __init__(self, directory, timeouts=None, **settings):
        model = str(settings.pop("model_dir"))
        self._defaults = settings.pop("sampling_defaults", None)
        control = f"ipc://{directory}/control-{secrets.token_hex(4)}"
        # a process that gets no core, or looks for garbage, for a while has no dead workers
        # its thread writes past pytest's capture, so lines of requests would be on the terminal
        quiet = {"canary_s": 0.0, "access_log": False}
        settings = {"drain_timeout_s": 60.0, "port": 0, "worker_timeout_s": 60.0} | quiet | settings
        config = RouterConfig(model=model, control_bind=control, **{"served_model": MODEL} | settings)
        self.tokenizer = load_tokenizer(model)
        self._timeouts = timeouts
        self._config = config
        self._ready = threading.Event()
        self.error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        self.url = self.router.url
        self.control = control
        self.workers = []

    def _run(self):
        loop = uvloop.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._serve())
        except Exception as error:
            self.error = error
        finally:
            loop.close()
            self._ready.set()

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        self.drain, self.stop = asyncio.Event(), asyncio.Event()
        self.router = Router(
            self._config,
            self.tokenizer,
            shared_fork_server(),
            self._timeouts,
            sampling_defaults=self._defaults,
        )
        self._ready.set()
        await self.router.run(self.drain, self.stop)

    def call(self, function):
        """`function()` on the router's loop."""
        done = threading.Event()
        result = []

        def work():
            result.append(function())
            done.set()

        self.loop.call_soon_threadsafe(work)
        assert done.wait(60)
        return result[0]

    def let_pass(self, seconds):
        """On its loop: for the router's rooms and workers it is so much later from now on."""
        dispatcher = self.router.dispatcher
        clock = dispatcher._clock
        dispatcher._clock = lambda: clock() + seconds

    def add(self, role, script, **hello):
        worker = FakeWorker(self.control, role, script, **hello)
        self.workers.append(worker)
        return worker

    def pair(self, script, **hello):
        """A prefill and a decode worker, once they serve."""
        pair = self.add("prefill", script.prefill, **hello), self.add("decode", script.decode, **hello)
        until(lambda: self.call(lambda: self.router.dispatcher.is_ready), "a pair is ready")
        return pair

    def begin_drain(self):
        self.loop.call_soon_threadsafe(self.drain.set)

    def begin_stop(self):
        self.loop.call_soon_threadsafe(self.stop.set)

    def join(self, timeout=60):
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the router did not end"
        assert self.error is None, self.error

    def close(self):
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.stop.set)
            self.loop.call_soon_threadsafe(self.drain.set)
        self.join()
        for worker in self.workers:
            worker.close()


@contextlib.contextmanager
def without_collector(*kinds):
    """Yields a function that lists live objects of these types; the garbage collector is off meanwhile."""
    gc.collect()
    gc.freeze()  # what others keep is not looked at
    gc.disable()
    try:
        yield lambda: [repr(thing) for thing in gc.get_objects() if type(thing) in kinds]
    finally:
        gc.enable()
        gc.unfreeze()


def until(condition, what, timeout=60.0):
    """Polls until `condition()` holds; its value."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError(f"not within {timeout} s: {what}")


@contextlib.contextmanager
def routers(directory, model_dir):
    """make(**settings) -> (router, script); all routers that were made are closed."""
    started = []

    def make(patience=PATIENCE, **settings):
        running = RunningRouter(directory, patience, **{"model_dir": model_dir} | settings)
        started.append(running)
        return running, Script(running.tokenizer.encode(ANSWER))

    try:
        yield make
    finally:
        for running in started:
            running.close()


def post(running, **more):
    return httpx.post(running.url + "/v1/chat/completions", json=BODY | more, timeout=60)


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    return thread, results


def open_request(running, headers=None, **more):
    """A connection with a request on it and no answer read."""
    connection = http.client.HTTPConnection("127.0.0.1", running.router.port)
    headers = {"content-type": "application/json", **(headers or {})}
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY | more), headers)
    return connection


def assert_nothing_left(running):
    dispatcher = running.router.dispatcher
    until(
        lambda: running.call(lambda: dispatcher.num_open + dispatcher.num_queued) == 0, "every room is closed"
    )
    assert running.call(lambda: sum(worker.num_rooms for worker in dispatcher.registry)) == 0
