"""A character tokenizer with a chat template, for the built-in tiny model. It saves and loads like any other."""

from __future__ import annotations

from typing import Any

PAD, END, SYSTEM, USER, BOT, UNKNOWN = "<pad>", "<end>", "<sys>", "<user>", "<bot>", "<unk>"

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{% if m.content %}<sys>{{ m.content }}{% endif %}"
    "{% elif m.role == 'user' %}<user>{{ m.content }}"
    "{% else %}<bot>{{ m.content }}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def character_tokenizer() -> Any:
    """Printable ASCII and the newline, one token per character; anything else is unknown."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = ["\n", *(chr(c) for c in range(32, 127))]
    vocabulary = {token: i for i, token in enumerate([PAD, END, SYSTEM, USER, BOT, UNKNOWN, *alphabet])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[SYSTEM, USER, BOT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
