"""`add_special_tokens`: the tokenizer's own begin and end tokens around a prompt or a rendered chat."""

import pytest
from baton.router.sandbox.template_renderer import Chat
from baton.router.text.tokenizer import GuardedChat, Tokenizer
from baton.tests.cluster.router_fakes import save_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

BEGIN, END = 0, 2


def tokenizer_with(directory, single):
    made = PreTrainedTokenizerFast.from_pretrained(save_tokenizer(directory))
    if single:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single=single, special_tokens=[("<|endoftext|>", BEGIN), ("<|im_end|>", END)]
        )
    return Tokenizer(made)


@pytest.mark.parametrize(
    ("single", "before", "behind"),
    [("", [], []), ("<|endoftext|> $A", [BEGIN], []), ("<|endoftext|> $A <|im_end|>", [BEGIN], [END])],
)
def test_special_tokens_are_added_on_request(tmp_path, single, before, behind):
    tokenizer = tokenizer_with(tmp_path, single)
    plain = tokenizer.encode("hello world", add_special_tokens=False)
    framed = tokenizer.encode("hello world")
    assert framed == [*before, *plain, *behind]
    for add, ids in ((False, plain), (True, framed)):
        found, starts = tokenizer.encode_with_starts("hello world", add_special_tokens=add)
        assert (found, len(starts)) == (ids, len(ids))
    for chat in (GuardedChat(Chat(messages=[]), "", []), GuardedChat(Chat(messages=[]), "@", ["<|im_end|>"])):
        rendered = "hello @0x world" if chat.spelled else "hello world"
        bare = tokenizer.encode_rendered(chat, rendered)
        assert tokenizer.encode_rendered(chat, rendered, add_special_tokens=True) == [*before, *bare, *behind]
        assert END not in bare
