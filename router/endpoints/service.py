"""Turns a checked body into an answer: renders, tokenises, checks the workers' limits, submits to the
dispatcher."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ...cluster.config.router_groups import CHAT_AUTO, SHOW_PORTLESS
from ...cluster.protocol.messages import RoutedShape
from ...cluster.protocol.prompt_embeds import ELEMENT_BYTES
from ...cluster.telemetry.trace_context import NOWHERE, TraceContext
from ...cluster.telemetry.tracing import Tracing, Untraced
from ..answers.answer import Answer, AnswerOptions
from ..answers.chat_replies import ChatBuilder
from ..answers.completion_replies import CompletionBuilder
from ..answers.generation import Choice, ChoiceOptions, Prompt, name_of
from ..answers.message_replies import MessageBuilder, TokenCount
from ..answers.replies import Builder, DetokenizeReply, Frame, TokenizeReply
from ..answers.response_replies import ResponseBuilder
from ..answers.routed_experts import RoutedRows
from ..api.body_checks import (
    COMPLETION_MAX_TOKENS,
    check_chat,
    check_token_ids,
    logprobs_of,
    max_new_of,
    prompts_of,
    sampling_of,
)
from ..api.body_types import ChatBody, CompletionBody, DetokenizeBody, RequestMessage, TokenizeBody
from ..api.message_bodies import CountBody, MessageBody, chat_of_message, in_words_of_messages
from ..api.prompt_embeds import check_size, read_embeds
from ..api.response_bodies import ResponseBody, chat_of, in_words_of_responses, told_of
from ..api.sampling_defaults import SamplingDefaults
from ..api.tool_bodies import Tool, as_template_tool
from ..errors import ApiError, bad_request, context_too_long, unknown_model
from ..formats.registry import Formats
from ..http.exchange import ClientGone
from ..http.rate_limits import ANYONE, Caller
from ..sandbox.fork_server import ForkServer
from ..scheduling.dispatcher import Dispatcher
from ..scheduling.inbox import Inbox
from ..scheduling.request_limits import (
    CHAT_MAX_TOKENS,
    check_routed,
    embeds_width,
    max_new_tokens,
    most_of_prompt,
    no_workers,
    routed_shape,
)
from ..scheduling.request_state import ClientRequest, Entry, Job, Tag
from ..text.answer_form import AnswerForm, template_messages
from ..text.grammars import Grammars, plan_of
from ..text.templates import Templates, encoded
from ..text.tokenizer import GuardedChat, Tokenizer
from ..workers.eligibility import Limits, known_pairs
from .idempotency import Idempotency
from .request_spans import end_request, operation_of

# bytes of a body: about a millisecond of work, less than the hand-over to a thread costs under load
INLINE_BYTES = 2000
T = TypeVar("T")


class Call(Struct, frozen=True, kw_only=True, gc=False):
    """The attributes of a generation request outside its body."""

    arrived: float  # monotonic seconds
    request_id: str = ""  # the client's; "": none
    size: int  # bytes of the body
    route: str = "chat"  # the endpoint, as metrics name it
    wants_timeline: bool = False
    may_record: bool = True  # the request does not object to a record of its tokens for training
    timeout_s: float = 0.0  # the client's limit; 0: none
    ignored: tuple[str, ...] = ()  # the unknown fields of the body
    grammar: str = ""  # grammar of the answer, known once the body is read
    caller: Caller = ANYONE
    trace: TraceContext = NOWHERE  # context of the client's span
    has_left: Callable[[], bool] = lambda: False  # the client has left, and the request need not be prepared


class Service:
    """Serves generation requests, from the checked body to the answer. One per router."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        served_models: Sequence[str],
        clock: Callable[[], float],
        fork_server: ForkServer,
        tracing: Tracing | None = None,
        *,
        formats: Formats,
        chat_max_tokens: int,
        sampling_defaults: SamplingDefaults | None = None,
        takes_embeds: bool = False,
        embeds_bytes: int = 0,
        worker_metrics: str = SHOW_PORTLESS,
    ) -> None:
        self.dispatcher = dispatcher
        self.tracing = tracing or Untraced()
        self._is_traced = not isinstance(self.tracing, Untraced)
        self.responses: Mapping[int, int] = {}  # number of HTTP answers by status
        self.limit_parts = 1  # routers among which the limits of API keys are divided
        self.tokenizer = tokenizer
        self._formats = formats
        self._shown = frozenset(tokenizer.special_ids[text] for text in formats.shown)
        self._defaults = sampling_defaults or SamplingDefaults()
        # default output length of a chat; 0: all that fits
        self._chat_max_tokens = self._defaults.max_new_tokens or chat_max_tokens
        self._takes_embeds = takes_embeds
        self._embeds_bytes = embeds_bytes  # the most of a request; 0: those of a whole context
        self.served_models = tuple(served_models)  # names of the one model
        self.served_model = self.served_models[0]  # in answers
        self.worker_metrics = worker_metrics  # the workers whose series /metrics has
        self.started = int(time.time())
        self.clock = clock
        self.replays = Idempotency(clock, dispatcher.events)
        self.grammars = Grammars(fork_server, clock, dispatcher.events)
        setup = tokenizer.template_setup
        self.templates: Templates | None = None
        if setup is not None:
            self.templates = Templates(setup, fork_server, clock, dispatcher.events)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    def open(self) -> None:
        """Starts the template workers. To be called on the event loop that serves."""
        if self.templates is not None:
            self.templates.warm()

    def close(self) -> None:
        self.replays.close()
        self.grammars.close()
        if self.templates is not None:
            self.templates.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def respond(self, body: ResponseBody, call: Call) -> Answer:
        """POST /v1/responses: translated to a chat. Raises ApiError."""
        self._defaults.fill(body)
        try:
            asked = chat_of(body)
            check_chat(asked)
            return await self.chat(asked, call, partial(ResponseBuilder, told=told_of(body)), "resp_")
        except ApiError as error:
            raise in_words_of_responses(error) from None

    async def message(self, body: MessageBody, call: Call) -> Answer:
        """POST /v1/messages: translated to a chat. Raises ApiError."""
        try:
            asked = chat_of_message(body)
            check_chat(asked)
            return await self.chat(asked, call, MessageBuilder, "msg_")
        except ApiError as error:
            raise in_words_of_messages(error) from None

    async def count_tokens(self, body: CountBody, call: Call) -> TokenCount:
        """POST /v1/messages/count_tokens. Raises ApiError."""
        asked = chat_of_message(body)
        check_chat(asked)
        self._check_model(asked.model)
        form = AnswerForm.of(asked, self._formats)
        with self._counted(call):
            _, ids = await self._encode_chat(
                asked, asked.messages, call, form.tools, is_native=form.style.is_native
            )
        return TokenCount(len(ids))

    async def chat(
        self,
        body: ChatBody,
        call: Call,
        make_builder: Callable[[Frame], Builder] = ChatBuilder,
        prefix: str = "chatcmpl-",
    ) -> Answer:
        """POST /v1/chat/completions. Raises ApiError."""
        self._check_model(body.model)
        self._defaults.fill(body)
        with self._reading(call, body.priority):
            started = self.clock()
            form = AnswerForm.of(body, self._formats)
            text, ids = await self._encode_chat(
                body, body.messages, call, form.tools, is_native=form.style.is_native
            )
            tokenize_s = self.clock() - started
            form = form.after(text)
            if form.plan:
                call = replace(call, grammar=await self.grammars.of(form.plan))
        return self._answer(body, [Prompt(ids)], call, tokenize_s, _reply_id(prefix), make_builder, form)

    async def complete(self, body: CompletionBody, call: Call) -> Answer:
        """POST /v1/completions. Raises ApiError."""
        self._check_model(body.model)
        self._defaults.fill(body)
        prompts, embeds = prompts_of(body), body.embeds
        read_embedded = partial(read_embeds, width=self._embeds_width(embeds, body.num_tries))
        body.prompt_embeds = None  # the text is longer than what is kept of it
        self._check_chars(max([len(p) for p in prompts if isinstance(p, str)], default=0), "prompt")
        read_one = partial(
            self._prompt,
            wants_starts=body.wants_echo and logprobs_of(body) >= 0,
            add_special_tokens=body.add_special_tokens is not False,
        )
        with self._reading(call, body.priority):
            if plan := plan_of(body):
                call = replace(call, grammar=await self.grammars.of(plan))
            started = self.clock()
            is_work = bool(embeds) or any(isinstance(prompt, str) for prompt in prompts)  # ids need none
            size = call.size if is_work else 0

            def read_all() -> list[Prompt]:
                embedded = [read_embedded(text) for text in embeds]
                known = [Prompt([0] * given.rows.count, embeds=given) for given in embedded]
                return known + [read_one(prompt) for prompt in prompts]

            read = await self._in_thread(call, size, read_all)
        tokenize_s = self.clock() - started
        return self._answer(body, read, call, tokenize_s, _reply_id("cmpl-"), CompletionBuilder)

    async def tokenize(self, body: TokenizeBody, call: Call) -> TokenizeReply:
        """POST /tokenize. Raises ApiError."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give prompt or messages, and not both", param="prompt")
        with self._counted(call):
            if body.messages is not None:
                _, ids = await self._encode_chat(
                    body,
                    body.messages,
                    call,
                    body.tools or (),
                    is_native=self._formats.style_of(must_follow=False).is_native,
                )
            else:
                text, add_special_tokens = body.prompt or "", body.add_special_tokens is not False
                self._check_chars(len(text), "prompt")
                work = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
                ids = await self._in_thread(call, call.size, work)
            names = (
                await self._in_thread(call, call.size, partial(self._names, ids))
                if body.return_token_strs
                else None
            )
        live = self.dispatcher.limits()
        fitting = live.fitting if live is not None else None
        return TokenizeReply(count=len(ids), max_model_len=fitting, tokens=ids, token_strs=names)

    async def detokenize(self, body: DetokenizeBody, call: Call) -> DetokenizeReply:
        """POST /detokenize. Raises ApiError."""
        self._check_model(body.model)
        with self._counted(call):
            return DetokenizeReply(
                prompt=await self._in_thread(call, call.size, partial(self._decoded, body.tokens))
            )

    def _reading(self, call: Call, priority: int | None) -> AbstractContextManager[None]:
        """Bounds the preparation of a request that will need workers. Raises ApiError (429)."""
        now, admission = self.clock(), self.dispatcher.admission
        admission.check_queue(call.caller.priority_of(priority), now)
        return admission.parse_limiter.reading(call.caller, call.size, now)

    @contextmanager
    def _counted(self, call: Call) -> Iterator[None]:
        """Bounds and counts a request that needs no worker. Raises ApiError (429)."""
        now, admission = self.clock(), self.dispatcher.admission
        with admission.parse_limiter.reading(call.caller, call.size, now):
            admission.gate.charge(call.caller, 0, now)
            yield

    def _names(self, ids: Sequence[int]) -> list[str]:
        return [name_of(self.tokenizer.token_bytes[i]) for i in ids]

    def _decoded(self, ids: Sequence[int]) -> str:
        """Raises ApiError (400) for an id outside the vocabulary."""
        wrong = next((i for i in ids if i >= len(self.tokenizer)), None)
        if wrong is not None:
            text = f"tokens: token id {wrong} is outside the vocabulary of {len(self.tokenizer)}"
            raise bad_request(text, param="tokens")
        return self.tokenizer.decode(ids)

    async def _encode_chat(
        self,
        body: ChatBody | TokenizeBody,
        said: Sequence[RequestMessage],
        call: Call,
        tools: Sequence[Tool],
        *,
        is_native: bool,
    ) -> tuple[str, list[int]]:
        """The rendered chat and its token ids. Raises ApiError (400)."""
        self._check_chars(sum(message.num_chars for message in said), "messages")
        self._check_chars(sum(len(tool.function.description or "") for tool in tools), "tools")

        def guard() -> GuardedChat:
            messages, shown = template_messages(self._formats, said), [as_template_tool(t) for t in tools]
            return self.tokenizer.guard(
                messages,
                body.chat_template_kwargs,
                shown,
                is_native=is_native,
                has_answer_head=body.has_answer_head,
                is_continued=bool(body.continue_final_message),
            )

        guarded = await self._in_thread(call, call.size, guard)
        assert self.templates is not None, "a chat was guarded, so there is a template"
        rendered = await self.templates.render(encoded(guarded.chat), is_long=call.size > INLINE_BYTES)
        self._check_chars(guarded.num_chars_of(rendered), "messages")
        encode = partial(
            self.tokenizer.encode_rendered,
            guarded,
            rendered,
            add_special_tokens=bool(body.add_special_tokens),
        )
        return rendered, await self._in_thread(call, len(rendered), encode)

    def _prompt(self, prompt: str | list[int], *, wants_starts: bool, add_special_tokens: bool) -> Prompt:
        if not isinstance(prompt, str):
            return Prompt(prompt)
        if not wants_starts:
            return Prompt(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens), prompt)
        ids, starts = self.tokenizer.encode_with_starts(prompt, add_special_tokens=add_special_tokens)
        return Prompt(ids, prompt, starts)

    async def _in_thread(self, call: Call, size: int, work: Callable[[], T]) -> T:
        """Runs `work`, in a thread when `size` bytes are many.

        Raises ClientGone if the client left before it began.
        """
        if size <= INLINE_BYTES:
            return work()

        def do() -> T:
            if call.has_left():
                raise ClientGone
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    def _embeds_width(self, embeds: Sequence[str], num_tries: int) -> int:
        """The elements of a prompt embedding; 0 without `embeds`. Raises ApiError if `embeds` is not read."""
        if not embeds:
            return 0
        if not self._takes_embeds:
            text = "prompt_embeds is off: start the router and all workers with --prompt-embeds"
            raise bad_request(text, param="prompt_embeds")
        width, live = embeds_width(known_pairs(self.dispatcher.registry)), self.dispatcher.limits()
        context = live.context if live is not None else 0
        check_size(embeds, num_tries, self._embeds_bytes or context * width * ELEMENT_BYTES["F32"])
        return width

    def _check_model(self, model: str | None) -> None:
        """Raises ApiError (404) for another model than the served one."""
        if model is not None and model not in self.served_models:
            raise unknown_model(model, self.served_model)

    def _check_chars(self, num_chars: int, param: str) -> None:
        """Raises ApiError (400) before tokenisation for a text that cannot fit."""
        live = self.dispatcher.limits()
        longest = live.context * self.tokenizer.longest_token if live is not None else None
        if longest is not None and num_chars > longest:
            raise context_too_long(
                f"The prompt has {num_chars} characters, "
                f"but no more than {longest} can fit this model's context.",
                param=param,
            )

    def _answer(
        self,
        body: ChatBody | CompletionBody,
        prompts: Sequence[Prompt],
        call: Call,
        tokenize_s: float,
        reply_id: str,
        make_builder: Callable[[Frame], Builder],
        form: AnswerForm | None = None,
    ) -> Answer:
        live = self.dispatcher.limits()
        if live is None:  # the workers' vocabulary, which may be larger than the tokenizer's, is unknown
            raise no_workers()
        choice_options = self._choice_options(body, form)
        num_choices, num_tries = body.num_choices, body.num_tries
        if body.truncate_prompt_tokens is not None:
            prompts = [self._truncated(body, prompt, live) for prompt in prompts]
        shape: RoutedShape | None = None
        if body.return_routed_experts:
            shape = routed_shape(known_pairs(self.dispatcher.registry))
        builder = make_builder(self._frame(body, reply_id, prompts))
        jobs: list[Job] = []
        choices: list[Choice] = []
        for prompt in prompts:
            check_token_ids(body, prompt.ids, self._vocab_size(live))
            jobs += self._jobs(body, prompt, live, call, tokenize_s)
            echo = prompt if body.wants_echo else None
            for _ in range(num_tries):
                routed = None
                if shape is not None:
                    routed = RoutedRows(shape, body.routed_experts_start_len or 0, len(prompt.ids))
                choices.append(Choice(self.tokenizer, choice_options, echo, routed))
        if shape is not None:
            check_routed(shape, [(len(job.prompt_ids), job.sampling) for job in jobs])
        # stop strings are searched for at once
        inbox = Inbox(self.clock, is_patient=not body.stream and not choice_options.stops)
        entries = self._submit(jobs, inbox, reply_id, call)
        options = AnswerOptions(
            is_stream=bool(body.stream),
            wants_usage=body.wants_usage,
            wants_usage_always=body.wants_usage_always,
            wants_accepted=body.wants_accepted_drafts,
            wants_timeline=call.wants_timeline,
            num_choices=num_choices,
            num_tries=num_tries,
            ignored=call.ignored,
        )
        return Answer(self.dispatcher, self.clock, entries, inbox, choices, builder, options)

    def _submit(self, jobs: Sequence[Job], inbox: Inbox, reply_id: str, call: Call) -> list[Entry]:
        """Submits the jobs within a trace span.

        The span ends with the last choice, or here for a refused request.
        """
        span = self.tracing.begin(f"{operation_of(reply_id)} {self.served_model}", call.trace, call.arrived)
        request_id = call.request_id or reply_id
        tag = Tag(reply_id=reply_id, request_id=request_id, span=span)
        if self._is_traced:
            tag = Tag(reply_id=reply_id, request_id=request_id, span=span, on_end=self._end_span)
        try:
            return self.dispatcher.submit(jobs, inbox, tag)
        except ApiError as error:
            span.end(self.clock(), {"baton.outcome": "rejected"}, error.body.code or str(error.status))
            raise

    def _end_span(self, request: ClientRequest, now: float) -> None:
        end_request(self.tracing, request, self.served_model, now)

    def _jobs(
        self, body: ChatBody | CompletionBody, prompt: Prompt, live: Limits, call: Call, tokenize_s: float
    ) -> list[Job]:
        is_chat = isinstance(body, ChatBody)
        asked, chat_max = max_new_of(body), self._chat_max_tokens
        max_new = max_new_tokens(len(prompt.ids), asked, is_chat=is_chat, chat_max=chat_max, live=live)
        return [
            Job(
                prompt_ids=prompt.ids,
                embeds=prompt.embeds,
                sampling=sampling_of(body, max_new=max_new, choice=choice, grammar=call.grammar),
                arrived=call.arrived,
                tokenize_s=tokenize_s,
                timeout_s=call.timeout_s,
                priority=call.caller.priority_of(body.priority),
                route=call.route,
                caller=call.caller,
                cache_salt=body.cache_salt or "",
                may_record=call.may_record and call.caller.may_record,
            )
            for choice in range(body.num_tries)
        ]

    def _truncated(self, body: ChatBody | CompletionBody, prompt: Prompt, live: Limits) -> Prompt:
        """The prompt with as many of its last tokens as `truncate_prompt_tokens` keeps."""
        keep = body.truncate_prompt_tokens or 0
        if keep < 0:
            chat_max = CHAT_MAX_TOKENS if self._chat_max_tokens == CHAT_AUTO else self._chat_max_tokens or 1
            default = chat_max if isinstance(body, ChatBody) else COMPLETION_MAX_TOKENS
            keep = most_of_prompt(max_new_of(body), default, live)
        return Prompt(prompt.ids[-keep:]) if len(prompt.ids) > keep else prompt

    def _frame(self, body: ChatBody | CompletionBody, reply_id: str, prompts: Sequence[Prompt]) -> Frame:
        return Frame(
            id=reply_id,
            created=int(time.time()),
            model=self.served_model,
            num_top=logprobs_of(body),
            wants_ids=bool(body.return_token_ids),
            prompt_ids=tuple([] if prompt.embeds else prompt.ids for prompt in prompts)
            if body.return_token_ids
            else (),
            num_choices=body.num_choices,
            wants_accepted=body.wants_accepted_drafts,
        )

    def _vocab_size(self, live: Limits) -> int:
        """The workers' vocabulary size, since a model's embedding may be larger than its tokenizer."""
        return live.vocab_size or len(self.tokenizer)

    def _choice_options(self, body: ChatBody | CompletionBody, form: AnswerForm | None) -> ChoiceOptions:
        is_read = form is not None and form.reader() is not None
        return ChoiceOptions(
            stops=body.stops,
            keeps_stop=body.keeps_stop,
            names_ids=bool(body.return_tokens_as_token_ids),
            begins_with=body.messages[-1].text if isinstance(body, ChatBody) and body.echo else "",
            skip_special=True if body.skip_special_tokens is None else body.skip_special_tokens,
            num_top=logprobs_of(body),
            min_tokens=body.min_tokens or 0,
            is_silent=max_new_of(body) == 0,
            make_reader=form.reader if form is not None and is_read else None,  # type: ignore[arg-type]
            may_think=is_read and self._formats.reasoning is not None,
            shown=self._shown if is_read else frozenset(),
        )


def _reply_id(prefix: str) -> str:
    return prefix + os.urandom(12).hex()
