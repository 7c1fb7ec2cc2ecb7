"""The cache of words gives the ids of the tokenizer, for every text, or none."""

import random

import pytest
from baton.router.text.word_ids import CUTS, MAX_CHARS, MAX_WORDS, word_ids
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>"]
TEXTS = [
    "Hello, world! It's what they've said: 12345 dogs, 67 cats; naïve cafés. def f(x):\n\treturn x + "
    "1\r\n\n日本語"
]
# Hard cases for cutting: white space, combining marks, signs, contractions, digits, control tokens.
PARTS = [
    *"aZé日\u017f1٣²', .!?(\"-_",
    *"    ",
    "\n",
    "\r\n",
    "\t",
    "\u00a0",
    "\u2003",
    "\u0301",
    "\x1c",
    "\u200b",
    "😀",
]
PARTS += ["hello", "world", "'s", "'LL", "cats,", " dogs", "123", "  ", *SPECIAL]


def spaces():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def cut_by(pattern, **options):
    split = pre_tokenizers.Split(Regex(pattern), **({"behavior": "isolated"} | options))
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


KNOWN = {
    "letters": spaces(),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), spaces()]),
    "runs of digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), spaces()]),
} | {f"cut {number}": cut_by(cut) for number, cut in enumerate(sorted(CUTS))}


def backend(pre_tokenizer, model=None, normalizer=None):
    made = Backend(model or models.BPE())
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if model is None:
        trainer = trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
        )
        made.train_from_iterator(TEXTS * 4, trainer)
    return made


def plain(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "NFC"])
@pytest.mark.parametrize("name", KNOWN)
def test_ids_are_those_of_the_tokenizer_whatever_stands_beside_a_space(name, normalizer):
    tokenizer = backend(KNOWN[name], normalizer=normalizer)
    words, rng, num_found = word_ids(tokenizer), random.Random(name), 0
    for _ in range(600):
        text = "".join(rng.choices(PARTS, k=rng.randrange(1, 14)))
        for _ in range(2):  # new, and known
            ids = words.encode(text)
            assert ids is None or ids == plain(tokenizer, text), repr(text)
        num_found += ids is not None
    assert num_found > 100


@pytest.mark.parametrize("name", KNOWN)
def test_all_pairs_of_neighbours_of_a_space_give_the_tokenizers_ids(name):
    tokenizer = backend(KNOWN[name])
    words = word_ids(tokenizer)
    for left in PARTS:
        for right in PARTS:
            for text in (f"{left} {right}", f"x {left} {right} y"):
                ids = words.encode(text)
                assert ids is None or ids == plain(tokenizer, text), repr(text)
    assert words.encode("hello world, cats") == plain(tokenizer, "hello world, cats")


def test_a_chat_as_templates_write_it_has_the_same_ids_new_and_known():
    tokenizer = backend(KNOWN["letters"])
    words = word_ids(tokenizer)
    text = (
        "<|im_start|>user\nHello, world! It's what they said.\n"
        "The cats, too.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert words.encode(text) == words.encode(text) == plain(tokenizer, text)


@pytest.mark.parametrize("text", ["word", "a  b", "\n\n", "x" * MAX_CHARS + " y"])
def test_long_texts_and_those_without_a_lone_space_go_to_the_tokenizer(text):
    assert word_ids(backend(KNOWN["letters"])).encode(text) is None


@pytest.mark.parametrize(
    "text", ["a  b c", "a \tb c", "a\n b c", "a b \n", " a b ", "if a:\n    return b\n\n  c d"]
)
def test_other_white_space_is_encoded_as_by_the_tokenizer(text):
    tokenizer = backend(KNOWN["letters"])
    assert word_ids(tokenizer).encode(text) == plain(tokenizer, text)


def test_memory_is_bounded_and_still_right():
    tokenizer = backend(KNOWN["letters"])
    words = word_ids(tokenizer)
    words.update(dict.fromkeys(map(str, range(MAX_WORDS)), b""))
    assert words.encode("hello world cats") == plain(tokenizer, "hello world cats")
    assert len(words) == 3
    long = "hello " + "x" * 1000 + " world"
    assert words.encode(long) == plain(tokenizer, long)
    assert len(words) == 3


OTHERS = {
    "a prefix": backend(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no cut": backend(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "another cut": backend(cut_by(r"\s+\S+|\S+")),
    "a cut the other way": backend(cut_by(min(CUTS), invert=True)),
    "a cut that drops": backend(cut_by(min(CUTS), behavior="removed")),
    "a metaspace": backend(pre_tokenizers.Metaspace()),
    "another normalizer": backend(spaces(), normalizer=normalizers.NFKC()),
    "dropout": backend(spaces(), models.BPE(dropout=0.5)),
    "another model": backend(spaces(), models.WordLevel({"a": 0}, unk_token="a")),
}
TOKENS = {
    "takes the space before it": AddedToken("<x>", lstrip=True),
    "takes the space behind it": AddedToken("<x>", rstrip=True),
    "looks around": AddedToken("<x>", single_word=True),
    "holds a space": AddedToken("<a b>"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_of_cutting_are_left_to_the_tokenizer(name):
    assert word_ids(OTHERS[name]) is None


@pytest.mark.parametrize("content", ["hello", "!", "'s"])
def test_special_tokens_that_spell_words_are_found(content):
    tokenizer = backend(spaces())
    tokenizer.add_tokens([AddedToken(content)])
    text = "Well hello, world! hello! it's what they said, xhello x"
    assert word_ids(tokenizer).encode(text) == plain(tokenizer, text)


@pytest.mark.parametrize("name", TOKENS)
def test_tokenizers_with_unusual_special_tokens_get_no_word_cache(name):
    tokenizer = backend(spaces())
    assert word_ids(tokenizer) is not None
    tokenizer.add_tokens([TOKENS[name]])
    assert word_ids(tokenizer) is None
