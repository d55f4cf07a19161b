"""A byte-level BPE tokenizer that gives every text back exactly."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOS = "<|endoftext|>"
"""Token that separates documents and ends a text; always the last id of the vocabulary."""


def train(texts: Iterable[str], size: int) -> Tokenizer:
    """A tokenizer of at most `size` entries, `EOS` included, learned from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([EOS])
    return tokenizer


CHAT = (
    "{% if tools %}tools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'call a tool by <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>\n{% endif %}'
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '\\n' }}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A plain chat template with tools: the pair is no assistant, but accepts chat requests."""


def load(path: Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`."""
    return Tokenizer.from_file(str(path))


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, for a model of `context` tokens."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        chat_template=CHAT,
    )
    wrapped.save_pretrained(folder, save_jinja_files=False)
