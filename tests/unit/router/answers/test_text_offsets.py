"""Text offsets of tokens: those of an echoed prompt as the client wrote it, and those of the output."""

import codecs
from unicodedata import normalize

import hypothesis.strategies as st
import pytest
from baton.cluster.protocol.messages import TokenLogprob
from baton.router.answers.generation import Choice, ChoiceOptions, Prompt
from baton.router.rooms.effects import Deliver
from baton.router.text.tokenizer import Tokenizer, load_tokenizer
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.parity.conftest import smollm2_dir
from hypothesis import given
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

__all__ = ["smollm2_dir"]

START, END = "<|im_start|>", "<|im_end|>"
PARTS = ["hello", " world", "a", " ", "\n", "  ", "é", "日本", "😀", "👩\u200d👧", START, END, "<|im_"]
DECOMPOSED = [
    "e\u0301",
    " e\u0301",
    "\u1112\u1161\u11ab",
    "A\u030a",
    "o\u0302\u0301",
]  # NFC makes one character of each


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Byte-level, nothing around a text."""
    return load_tokenizer(str(save_tokenizer(tmp_path_factory.mktemp("tok"))))


@pytest.fixture(scope="module")
def framed(tmp_path_factory):
    """The same with a token before and after any text, composed characters, and spaces trimmed off."""
    backend = Backend.from_file(str(save_tokenizer(tmp_path_factory.mktemp("tok")) / "tokenizer.json"))
    backend.normalizer = normalizers.NFC()
    around = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=[(START, 1), (END, 2)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), around])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.fixture(scope="module")
def marked():
    """The other family: a begin token, a mark before the text that is not in it, byte tokens."""
    tokens = ["<s>", "▁", "h", "e", "▁he", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("h", "e"), ("▁", "he")]
    backend = Backend(models.BPE(vocab | {"he": len(vocab)}, merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def read(tokenizer, prompt):
    """A prompt as a client gave it."""
    if isinstance(prompt, str):
        ids, starts = tokenizer.encode_with_starts(prompt)
        assert ids == tokenizer.encode(prompt)
        return Prompt(ids, prompt, starts)
    return Prompt(prompt)


def echoed(tokenizer, prompt, *, skip_special=True, output=()):
    """The text of a prompt and an output, and where each token begins in it."""
    given = read(tokenizer, prompt)
    choice = Choice(tokenizer, ChoiceOptions(num_top=0, skip_special=skip_special), given)
    some = TokenLogprob(logprob=-1.0)
    piece = choice.add(Deliver(list(output), [some for _ in output], [some for _ in given.ids[1:]]))
    return piece.text, [token.at for token in piece.logprobs]


def assert_each_begins_behind_what_those_before_it_spell(tokenizer, text, *, num_around=0, skip_special=True):
    """Byte-level tokens are the bytes of the text; those of a split character point to its beginning."""
    ids = tokenizer.encode(text)
    output = tokenizer.encode("a!")[num_around : num_around + 2]
    whole, starts = echoed(tokenizer, text, skip_special=skip_special, output=output)
    spelled = [tokenizer.token_bytes[token] for token in ids]
    if num_around:
        spelled[0] = spelled[-1] = b""
    data = b""
    for at, more in zip(starts, spelled, strict=False):
        before, _ = codecs.utf_8_decode(data, "strict", False)
        assert normalize("NFC", text[:at]) == normalize("NFC", before), (text, starts)
        data += more
    assert normalize("NFC", data.decode()) == normalize("NFC", text)
    assert (whole, starts[len(ids) :]) == (text + "a!", [len(text), len(text) + 1])


@given(
    parts=st.lists(st.sampled_from(PARTS + DECOMPOSED), min_size=1, max_size=9), skip_special=st.booleans()
)
def test_each_token_of_a_prompt_begins_after_the_text_of_earlier_tokens(tokenizer, parts, skip_special):
    assert_each_begins_behind_what_those_before_it_spell(tokenizer, "".join(parts), skip_special=skip_special)


@given(
    parts=st.lists(st.sampled_from(PARTS + DECOMPOSED), min_size=1, max_size=9), skip_special=st.booleans()
)
def test_offsets_hold_with_added_tokens_and_composed_characters(framed, parts, skip_special):
    text = "".join(parts)
    assert_each_begins_behind_what_those_before_it_spell(
        framed, text, num_around=1, skip_special=skip_special
    )


@pytest.mark.smollm2
def test_control_tokens_of_the_demo_model_are_characters_of_the_prompt(smollm2_dir):
    real = load_tokenizer(str(smollm2_dir))
    assert echoed(real, f"{START}user") == (f"{START}user", [0, 12])
    text = f"{START}user\nhi 😀{END}\n"
    assert echoed(real, text) == (text, [0, 12, 16, 17, 19, 20, 21, 31])
    assert echoed(real, text, skip_special=False) == echoed(real, text)
    assert_each_begins_behind_what_those_before_it_spell(real, f"{END}{START}x{START}{START} e\u0301")


@pytest.mark.parametrize("skip_special", [True, False])
def test_an_added_token_has_the_offset_of_the_next_token(framed, skip_special):
    ids = framed.encode("a b")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 5)
    assert echoed(framed, "a b", skip_special=skip_special, output=ids[1:2]) == ("a ba", [0, 0, 1, 2, 3, 3])
    text = f"{START}a"
    assert echoed(framed, text, skip_special=skip_special) == (text, [0, 0, 12, 13])


def test_a_character_of_several_tokens_is_where_each_of_them_is(tokenizer):
    assert len(tokenizer.encode("😀")) == 4
    assert echoed(tokenizer, f"{START}😀b") == (f"{START}😀b", [0, 12, 12, 12, 12, 13])


def test_offsets_count_characters_of_the_client_and_not_of_the_tokenizer(framed):
    for text in ("e\u0301b", "\u1112\u1161\u11abb", "\u0958b"):  # composed, and one that becomes two
        _, starts = echoed(framed, text, output=framed.encode("c")[1:2])
        assert starts[:2] == [0, 0]
        assert starts[-3:] == [len(text) - 1, len(text), len(text)], "b, the end token, c"


@pytest.mark.parametrize("skip_special", [True, False])
def test_a_mark_before_the_text_is_no_character_of_it(marked, skip_special):
    assert marked.token_bytes.strips_first_space
    wanted = {
        "he he": [0, 0, 2, 5],
        "é<s>he": [0, 0, 0, 0, 1, 4, 6],
        " he": [0, 0, 0, 3],
    }
    for text, starts in wanted.items():
        assert echoed(marked, text, skip_special=skip_special, output=[1]) == (f"{text} ", starts)


def test_token_ids_have_the_text_of_the_tokenizer(tokenizer, framed):
    ids = [1, *tokenizer.encode("a😀"), 2, *tokenizer.encode("b")]
    assert echoed(tokenizer, ids, output=ids[-1:]) == ("a😀bb", [0, 0, 1, 1, 1, 1, 2, 2, 3])
    spelled = f"{START}a😀{END}b"
    assert echoed(tokenizer, ids, skip_special=False) == (spelled, [0, 12, 13, 13, 13, 13, 14, 24])
    assert echoed(framed, ids[:2]) == ("a", [0, 0]), "nothing is put around them"
