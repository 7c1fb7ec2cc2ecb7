"""The field table: how this server treats each field of the OpenAI API, and the fields that it adds.

docs/api.md shows these tables, and the types in `bodies` have exactly these fields. Tests compare all three
with each other and with the published schema. A refused field passes when it is null or has one of its
`harmless` values, which ask for nothing. For objects inside a body, the table lists only unsupported fields;
INSIDE names those objects.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import UNTHREADED

# fields of chats that /v1/responses takes, too
PASSED_ON = (
    "stop",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "cache_salt",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "json_schema",
    "regex",
    "ebnf",
)

State = Literal["works", "ignored", "refused"]


@dataclass(frozen=True)
class Field:
    """One row of the table: a field's state, its explanation, and the compact JSON values allowed for a
    refused field."""

    state: State
    says: str
    harmless: tuple[bytes, ...] = ()
    code: str | None = None  # of the error about a refused field


def _works(says: str) -> Field:
    return Field("works", says)


def _ignored(says: str) -> Field:
    return Field("ignored", says)


def _refused(says: str, *harmless: bytes, code: str | None = None) -> Field:
    return Field("refused", says, harmless, code)


_NO_SPACES = _ignored("JSON is written without optional white space")
_BACKEND = _ignored("there is one backend")
STRUCTURED_OUTPUTS: Mapping[str, Field] = {
    "structural_tag": _refused("tools are called in the model's own form: use tools"),
    "disable_fallback": _BACKEND,
    "disable_any_whitespace": _NO_SPACES,
    "disable_additional_properties": _ignored("objects are closed where the schema does not say otherwise"),
    "whitespace_pattern": _NO_SPACES,
}
_CONSTRAINTS: dict[str, Field] = {
    "structured_outputs": _works(
        "added; vLLM's object: one of `json`, `regex`, `choice`, `grammar` and `json_object`"
    ),
    "guided_json": _works("added; a JSON schema, as an object or as text"),
    "guided_regex": _works("added; a regular expression that the whole answer matches, without look-around"),
    "guided_choice": _works("added; up to 1024 texts, of which the answer is one"),
    "guided_grammar": _works("added; a grammar in Lark, or in GBNF (EBNF)"),
    "guided_decoding_backend": _BACKEND,
    "guided_whitespace_pattern": _NO_SPACES,
    "json_schema": _works("added; SGLang's name of guided_json"),
    "regex": _works("added; SGLang's name of guided_regex"),
    "ebnf": _works("added; SGLang's name of guided_grammar"),
}

_COMMON: dict[str, Field] = {
    "model": _works("a name in /v1/models, also when it is left out; another one is a 404"),
    "stream": _works("server-sent events, ended by `[DONE]`"),
    "stream_options": _works(
        "`include_usage`; `continuous_usage_stats`: in every chunk; `include_accepted_drafts`: "
        "[marks drafts](#accepted-drafts-in-a-stream); `include_obfuscation` is ignored"
    ),
    "n": _works(
        "up to 128 choices over all prompts; the prompt is computed and handed over once, and "
        "[its pages are shared](running.md#choices-of-a-request)"
    ),
    "stop": _works("a string, or up to 64 of up to 256 characters"),
    "seed": _works("equal seeds give equal answers; choice i takes seed + i"),
    "temperature": _works("0 is greedy; between 0 and 0.001 counts as 0.001; up to 100"),
    "top_p": _works("0 keeps the likeliest token"),
    "frequency_penalty": _works("over the output so far"),
    "presence_penalty": _works("over the output so far"),
    "logit_bias": _works("up to 1024 token ids"),
    "user": _ignored("requests are not attributed to users"),
    "top_k": _works("added; 0 or -1: off"),
    "min_p": _works("added; relative to the likeliest token"),
    "repetition_penalty": _works("added; over prompt and output"),
    "min_tokens": _works("added; no end token and no stop string counts before"),
    "priority": _works(
        "added; -100 to 100, lower goes first: a step is worth 10 s of waiting; never before its key's"
    ),
    "response_format": _works(
        "text, json_object, or json_schema, which answers always follow; in completions added"
    ),
    **_CONSTRAINTS,
    "ignore_eos": _works("added; the model's end tokens do not end the answer"),
    "stop_token_ids": _works("added; up to 1024"),
    "skip_special_tokens": _works("added; default true"),
    "include_stop_str_in_output": _works("added; default false; the text ends with the stop string"),
    "no_stop_trim": _works("added; SGLang's name of include_stop_str_in_output"),
    "add_special_tokens": _works(
        "added; the tokenizer's own begin and end tokens; default: true for a prompt, false for a chat, "
        "whose template writes them"
    ),
    "truncate_prompt_tokens": _works(
        "added; keeps so many tokens of the prompt, its last ones; -1: as many as fit beside the output"
    ),
    "cache_salt": _works("added; cached prefixes are shared only with requests of the same salt and key"),
    "return_token_ids": _works("added; `token_ids` of each choice, and `prompt_token_ids`"),
    "return_tokens_as_token_ids": _works("added; logprobs name tokens as `token_id:5`"),
    "return_routed_experts": _works(
        "added; with `--return-routed-experts`: [the experts that each token took](#experts-of-tokens)"
    ),
    "routed_experts_start_len": _works("added; tokens of the prompt whose experts are left out; default 0"),
    "spaces_between_special_tokens": _ignored("tokens are joined as they are"),
    "session_id": _ignored("prefixes are found by their tokens"),
    "separate_reasoning": _refused("`--reasoning-parser` decides it for all requests", b"true"),
    "stream_reasoning": _refused("`--reasoning-parser` decides it for all requests", b"true"),
    "include_reasoning": _refused("`--reasoning-parser` decides it for all requests", b"true"),
    "custom_params": _refused("no code of clients runs here", b"{}"),
    "nvext": _refused("give its fields by their own names", b"{}"),
    "use_beam_search": _refused("there is no beam search", b"false"),
    "length_penalty": _refused("there is no beam search", b"1", b"1.0"),
    "prompt_logprobs": _refused("/v1/completions has them: echo with logprobs"),
    "bad_words": _refused("logit_bias bans tokens", b"[]"),
    "allowed_token_ids": _refused("guided_choice and guided_regex limit the text", b"[]"),
    "logits_processors": _refused("no code of clients runs here", b"[]"),
}

CHAT: Mapping[str, Field] = _COMMON | {
    "messages": _works(
        "roles system, developer, user, assistant, tool; content is text or a list of text parts"
    ),
    "max_tokens": _works("the same as max_completion_tokens"),
    "max_completion_tokens": _works(
        "default: what is left of the context, `--chat-max-tokens` at most"
    ),
    "logprobs": _works("of the model's own distribution, before temperature and penalties"),
    "top_logprobs": _works("up to 20, with logprobs"),
    "chat_template_kwargs": _works(
        "added; the template's own switches: true, false, numbers, text of up to 256 characters"
    ),
    "add_generation_prompt": _works(
        "added; default true; false: the prompt ends behind the last message, without the head of an answer"
    ),
    "continue_final_message": _works(
        "added; the answer continues the text of the last message; add_generation_prompt is then false"
    ),
    "echo": _works("added, with continue_final_message; the text of the last message before the answer"),
    "tools": _works("up to 128 functions; [arguments](#reasoning-and-tool-calls) follow their schema"),
    "tool_choice": _works(
        "none, auto, required, one function, or allowed_tools: the others are not shown to the model"
    ),
    "parallel_tool_calls": _works("false: one call at most"),
    "functions": _refused("deprecated by the API: use tools", b"[]"),
    "function_call": _refused("deprecated by the API: use tool_choice", b'"none"'),
    "modalities": _refused("text only", b'["text"]'),
    "audio": _refused("text only"),
    "web_search_options": _refused("nothing is searched"),
    "moderation": _refused("nothing is moderated"),
    "chat_template": _refused("templates come from the model only"),
    "documents": _refused("put them into a message", b"[]"),
    "prediction": _ignored("a hint about speed; drafts come from the drafter"),
    "reasoning_effort": _ignored("a hint; chat_template_kwargs takes it to templates that read it"),
    "verbosity": _ignored("a hint"),
    "store": _ignored("nothing is stored"),
    "metadata": _ignored("goes with stored answers, and nothing is stored"),
    "service_tier": _ignored("there is one tier"),
    "safety_identifier": _ignored("requests are not attributed to users"),
    "prompt_cache_key": _ignored("prefixes are found by their tokens"),
    "prompt_cache_options": _ignored("prefixes are found by their tokens"),
    "prompt_cache_retention": _ignored("prefixes stay as long as there is room"),
}

COMPLETION: Mapping[str, Field] = _COMMON | {
    "prompt": _works("a string, token ids, or a list of either"),
    "prompt_embeds": _works(
        "added, with `--prompt-embeds`; base64 of safetensors, or a list of them, answered before `prompt`"
    ),
    "max_tokens": _works("default 16; 0 with echo: the prompt's log probabilities only"),
    "logprobs": _works("up to 20, of the model's own distribution; the chosen token is always among them"),
    "echo": _works("the prompt before the answer, with its log probabilities when logprobs is given"),
    "best_of": _works(
        "so many are generated, the n of the highest mean log probability are returned; not with stream"
    ),
    "suffix": _refused("nothing is inserted", b'""'),
}

RESPONSE: Mapping[str, Field] = {
    "model": _works("a name in /v1/models, also when it is left out; another one is a 404"),
    "input": _works("text, or items: messages of text, reasoning, function calls and their outputs"),
    "instructions": _works("a system message in front"),
    "max_output_tokens": _works("default: what is left of the context, `--chat-max-tokens` at most"),
    "temperature": _works("as in a chat"),
    "top_p": _works("as in a chat"),
    "top_logprobs": _works("up to 20, with include"),
    "include": _works("`message.output_text.logprobs`; other values are ignored"),
    "stream": _works("typed events"),
    "stream_options": _works("`include_obfuscation` is ignored; usage always comes at the end"),
    "metadata": _works("up to 16 pairs, repeated in the response"),
    "seed": _works("added; equal seeds give equal answers"),
    "priority": _works("added; as in a chat"),
    **{name: _COMMON[name] for name in PASSED_ON},
    "text": _works("`format`: text, json_object or json_schema; `verbosity` is ignored"),
    "tools": _works("up to 128 functions; there are no built-in tools"),
    "tool_choice": _works(
        "none, auto, required, one function, or allowed_tools: the others are not shown to the model"
    ),
    "parallel_tool_calls": _works("false: one call at most"),
    "background": _refused("the answer comes on this connection", b"false"),
    "conversation": _refused("nothing is stored: send the whole input"),
    "previous_response_id": _refused("nothing is stored: send the whole input"),
    "prompt": _refused("no prompt templates are stored"),
    "context_management": _refused("the input is taken as it is", b"[]"),
    "truncation": _refused("an input that is too long is an error", b'"disabled"'),
    "moderation": _refused("nothing is moderated"),
    "image": _refused("text only"),
    "access_programs": _refused("there are none", b"[]"),
    "reasoning": _ignored("a hint"),
    "max_tool_calls": _ignored("there are no built-in tools"),
    "store": _ignored("nothing is stored; the response says so"),
    "service_tier": _ignored("there is one tier"),
    "user": _ignored("requests are not attributed to users"),
    "safety_identifier": _ignored("requests are not attributed to users"),
    "prompt_cache_key": _ignored("prefixes are found by their tokens"),
    "prompt_cache_options": _ignored("prefixes are found by their tokens"),
    "prompt_cache_retention": _ignored("prefixes stay as long as there is room"),
}

MESSAGES: Mapping[str, Field] = {
    "model": _works("a name in /v1/models, also when it is left out; another one is a 404"),
    "messages": _works(
        "turns of user and assistant; content is text, or blocks of text, tool_use, tool_result and thinking"
    ),
    "system": _works("text, or blocks of text"),
    "max_tokens": _works("required, as in Anthropic's API"),
    "stop_sequences": _works("up to 64 of up to 256 characters"),
    "stream": _works("typed events"),
    "temperature": _works("as in a chat"),
    "top_p": _works("as in a chat"),
    "top_k": _works("as in a chat"),
    "tools": _works("up to 128 functions (type custom, or none); there are no server tools"),
    "tool_choice": _works("auto, any, tool, none; disable_parallel_tool_use: one call at most"),
    "thinking": _works(
        "sets the template's switches `enable_thinking` and `thinking`; without it the template decides"
    ),
    "output_config": _works("`format`: json_schema; `effort` is ignored"),
    "output_format": _works("the same as `output_config.format`, by its older name"),
    "chat_template_kwargs": _works("added; as in a chat"),
    "seed": _works("added; equal seeds give equal answers"),
    "priority": _works("added; as in a chat"),
    "container": _refused("there are none"),
    "mcp_servers": _refused("clients call their servers themselves", b"[]"),
    "context_management": _refused("the messages are taken as they are", b'{"edits":[]}'),
    "compaction": _refused("the messages are taken as they are"),
    "thread": _refused("nothing is stored: send all messages, as clients then do", code=UNTHREADED),
    "cache_control": _ignored("prefixes are found by their tokens"),
    "billing_policy": _ignored("nothing is billed"),
    "diagnostics": _ignored("a hint"),
    "fallback_credit_token": _ignored("nothing is billed"),
    "fallbacks": _ignored("there is one model"),
    "inference_geo": _ignored("there is one place"),
    "metadata": _ignored("requests are not attributed to users"),
    "service_tier": _ignored("there is one tier"),
    "speed": _ignored("there is one speed"),
}

_OF_AN_ANSWER = _ignored("of an answer before")
_BY_A_CLIENT = _ignored("clients add it to an answer")
_BY_TOKENS = _ignored("prefixes are found by their tokens")
_THOUGHTS = _ignored("thoughts of an answer before are not shown to the model")

MESSAGE: Mapping[str, Field] = {
    "refusal": _refused("text only"),
    "annotations": _refused("nothing is cited", b"[]"),
    "audio": _refused("text only"),
    "function_call": _refused("deprecated by the API: use tool_calls"),
    "parsed": _BY_A_CLIENT,
    "reasoning": _works("the same as reasoning_content"),
    "reasoning_content": _works("reasoning of an earlier answer, for templates that show it"),
    "thinking_blocks": _BY_A_CLIENT,
    "provider_specific_fields": _BY_A_CLIENT,
}
TEXT_PART: Mapping[str, Field] = {"prompt_cache_breakpoint": _BY_TOKENS, "cache_control": _BY_TOKENS}
CALL: Mapping[str, Field] = {"index": _BY_A_CLIENT}
CALLED: Mapping[str, Field] = {"parsed_arguments": _BY_A_CLIENT}
STREAM_OPTIONS: Mapping[str, Field] = {"include_obfuscation": _ignored("events are not padded")}
TEXT_OPTIONS: Mapping[str, Field] = {"verbosity": _ignored("a hint")}
RESPONSE_TOOL: Mapping[str, Field] = {
    "output_schema": _ignored("a hint"),
    "async": _refused("a call is answered in a later request", b"false"),
    "defer_loading": _refused("nothing is searched", b"false"),
    "allowed_callers": _refused("the model alone calls", b'["direct"]'),
}
OUTPUT_PART: Mapping[str, Field] = {
    "annotations": _OF_AN_ANSWER,
    "logprobs": _OF_AN_ANSWER,
    "parsed": _BY_A_CLIENT,
}
INPUT_MESSAGE: Mapping[str, Field] = {"id": _OF_AN_ANSWER, "status": _OF_AN_ANSWER, "phase": _OF_AN_ANSWER}
_CALLER: dict[str, Field] = {
    "caller": _refused("the model alone calls", b'{"type":"direct"}'),
    "namespace": _refused("functions have one name"),
}
INPUT_CALL: Mapping[str, Field] = _CALLER | {
    "id": _OF_AN_ANSWER,
    "status": _OF_AN_ANSWER,
    "parsed_arguments": _BY_A_CLIENT,
    "async": _refused("a call is answered in a later request", b"false"),
    "async_": _refused("`async`, as Python's client dumps it", b"false"),
}
INPUT_CALL_OUTPUT: Mapping[str, Field] = _CALLER | {"id": _OF_AN_ANSWER, "status": _OF_AN_ANSWER}
INPUT_REASONING: Mapping[str, Field] = {
    "id": _OF_AN_ANSWER,
    "status": _OF_AN_ANSWER,
    "summary": _THOUGHTS,
    "content": _works("parts of type reasoning_text, for templates that show the model its reasoning"),
    "encrypted_content": _THOUGHTS,
}

INSIDE: Mapping[str, Mapping[str, Field]] = {
    "`stream_options`": STREAM_OPTIONS,
    "`structured_outputs`": STRUCTURED_OUTPUTS,
    "a message of a chat": MESSAGE,
    "a call of it": CALL,
    "the call's `function`": CALLED,
    "a part of type text or input_text": TEXT_PART,
    "a part of type output_text": OUTPUT_PART,
    "an item of type message": INPUT_MESSAGE,
    "an item of type function_call": INPUT_CALL,
    "an item of type function_call_output": INPUT_CALL_OUTPUT,
    "an item of type reasoning": INPUT_REASONING,
    "a tool of /v1/responses": RESPONSE_TOOL,
    "`text` of /v1/responses": TEXT_OPTIONS,
}
