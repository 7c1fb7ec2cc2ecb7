"""The vocabulary that grammars see: control tokens are never text, added texts are, bytes are unchanged."""

import json
import time
import unicodedata

import numpy as np
import pytest
from baton.engine.grammar.grammar_tokenizer import Spelling, load_tokenizer
from baton.engine.grammar.guided import GrammarCompiler
from baton.router.sandbox.grammar_compiler import Plan, compiled
from baton.router.text.detokenizer import TokenBytes
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

CONTROL = ["<|im_start|>", "<|im_end|>"]
CALL = ["<tool_call>", "</tool_call>"]
LONGEST = "ool"
EOS = 1
PATIENCE_S = 30.0


def byte_level():
    """A common byte-level tokenizer: control tokens in front, added call tokens behind, a normalizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*CONTROL, *letters, "to", LONGEST, "im"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[("t", "o"), ("i", "m")]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(CONTROL)
    backend.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in CALL])
    return backend


def byte_fallback():
    """One of the other family."""
    tokens = [
        *CONTROL,
        "▁he",
        "llo",
        "▁",
        "w",
        "é",
        '"',
        LONGEST,
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    vocab = {piece: i for i, piece in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token=CONTROL[0]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(CONTROL)
    backend.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in CALL])
    return backend


MADE = {"byte level": byte_level, "byte fallback": byte_fallback}


@pytest.fixture(scope="module", params=MADE)
def backend(request):
    return MADE[request.param]()


@pytest.fixture(scope="module")
def path(backend, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="module")
def compiler(backend, path):
    compiler = GrammarCompiler(path, backend.get_vocab_size() + 5, [EOS])
    compiler.load()
    return compiler


def plan_of(schema):
    return Plan(answer=json.dumps(schema).encode())


class Walk:
    """An output under a grammar, which is at its end where only its end may come."""

    def __init__(self, compiler, backend, plan):
        self._guide = compiler.guide(compiled(plan))
        self._bytes = TokenBytes(backend)
        self.ids = []
        end = time.monotonic() + PATIENCE_S
        while not self._guide.is_ready:
            assert time.monotonic() < end, self._guide.fault
            time.sleep(0.001)

    @property
    def allowed(self):
        (mask,) = self._guide.masks(self.ids, [()])
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    @property
    def text(self):
        return self._bytes.joined(self.ids).decode()

    def take(self, choose=max):
        """The whole text, token by token."""
        while (allowed := self.allowed) != {EOS}:
            assert allowed, f"lost behind {self.text!r}"
            assert EOS not in allowed, f"may end behind {self.text!r}"
            self.ids.append(choose(allowed))
        return self.text


@pytest.mark.parametrize(
    "text", [*CONTROL, f"say {CONTROL[1]} {CONTROL[1]}", CALL[0] + CONTROL[0], "a\u0301 é", "日本 👍"]
)
def test_a_constant_is_generated_for_any_spelling(compiler, backend, text):
    for schema in ({"const": text}, {"const": {text: [text]}}, {"enum": [text + "x", text + "y"]}):
        got = json.loads(Walk(compiler, backend, plan_of(schema)).take())
        assert got in (schema.get("const"), *schema.get("enum", ()))


def test_control_tokens_may_come_in_no_string(compiler, backend):
    walk = Walk(compiler, backend, plan_of({"type": "string"}))
    walk.ids.append(backend.token_to_id('"'))
    assert not walk.allowed & {backend.token_to_id(piece) for piece in CONTROL}
    assert {backend.token_to_id(piece) for piece in CALL} <= walk.allowed, "added, and text"


def test_a_call_begins_and_ends_with_the_tokens_that_the_model_has_for_it(compiler, backend):
    """Where the call must come as where it may."""
    opens, closes = (backend.token_to_id(piece) for piece in CALL)
    tools = (
        (
            "look",
            b'{"type":"object","properties":{"x":{"const":1}},"required":["x"],"additionalProperties":false}',
        ),
    )
    for must_call in (True, False):
        walk = Walk(compiler, backend, Plan(tools=tools, must_call=must_call, may_repeat=False))
        assert opens in walk.allowed
        assert (walk.allowed == {opens}) == must_call
        walk.ids.append(opens)
        assert walk.take() == '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
        assert walk.ids[-1] == closes


def test_an_end_token_is_no_text_though_its_tokenizer_has_it_as_such(backend, path):
    for end in map(backend.token_to_id, (LONGEST, CALL[0])):
        tokenizer = load_tokenizer(path, backend.get_vocab_size(), [EOS, end])
        assert tokenizer.is_special_token(end)
        ids = tokenizer.tokenize_str(f"{LONGEST}{CALL[0]}{LONGEST}")
        assert end not in ids
        assert tokenizer.decode_str(ids) == f"{LONGEST}{CALL[0]}{LONGEST}"


def test_tokens_have_the_bytes_that_routers_make_of_them(backend, path):
    """But for the one byte that no text has, which llguidance keeps for itself."""
    table, size = TokenBytes(backend), backend.get_vocab_size()
    assert Spelling(path, size, [EOS]).tokens == [
        table[i] if table[i] != b"\xff" else b"" for i in range(size)
    ]


def test_texts_are_spelled_as_the_model_spells_them(backend, path):
    spelled = load_tokenizer(path, backend.get_vocab_size(), [EOS])
    for text in ("tool", f"to{CALL[1]} im"):
        if backend.normalizer.normalize_str(text) == text:  # which begins texts with a blank otherwise
            assert spelled.tokenize_str(text) == backend.encode(text, add_special_tokens=False).ids
    composed = unicodedata.normalize("NFC", "a\u0301")
    for text in ("a\u0301", composed, CONTROL[1], "hello w"):
        assert spelled.decode_bytes(spelled.tokenize_str(text)) == text.encode()
