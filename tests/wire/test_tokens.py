"""The bytes of each id, compared with the tokenizer's own decoding."""

import hashlib
import json
import threading
import time
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from outrider.tokens import SCREENED, TokenTable, TooManyTokens
from tests.in_time import in_time

TEXTS = [
    "def add(left, right):\n    return left + right\n",
    "Größe: 42 µm “quoted” ☃ 👩‍🚀 한국어\n\n",
    "    indented\tand tabbed  with   runs",
    "a",
    "",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens(["<|user|>"])
    tokenizer.add_tokens([AddedToken("        ", normalized=False), "☃☃", "<think>"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """A tokenizer like those of Llama 2 and Gemma."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *bytes_],
        limit_alphabet=30,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    # Trained as special only to have them in; in a real file the bytes are of the vocabulary alone.
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = described["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(described))


def metaspace() -> Tokenizer:
    """A tokenizer like those of T5 and of converted Mistral models."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=160, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def end_of_word() -> Tokenizer:
    """A tokenizer like those of the first GPT and of CLIP."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=160, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def words() -> Tokenizer:
    """A tokenizer without a decoder: the library puts spaces between tokens."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, ",": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    id_ = tokenizer.token_to_id(token)
    assert id_ is not None
    return id_


def joined(table: TokenTable, ids: list[int]) -> str:
    return b"".join(map(table.token_bytes, ids)).decode("utf-8", "replace")


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_bytes_are_the_text_itself(text: str) -> None:
    table = TokenTable.from_json(byte_level().to_str())
    assert b"".join(map(table.token_bytes, table.encode(text))) == text.encode()


def test_byte_level_bytes_of_every_id_are_what_is_decoded() -> None:
    tokenizer = byte_level()
    table = TokenTable.from_json(tokenizer.to_str())
    for id_ in range(table.size):
        assert joined(table, [id_]) == tokenizer.decode([id_]), tokenizer.id_to_token(id_)


def test_added_tokens_are_text_and_special_ones_are_not() -> None:
    tokenizer = byte_level()
    table = TokenTable.from_json(tokenizer.to_str())
    ids = table.encode("<|user|>x        ☃☃<think><eos>")
    assert joined(table, ids) == "x        ☃☃<think>" == tokenizer.decode(ids)
    eos, user = id_of(tokenizer, "<eos>"), id_of(tokenizer, "<|user|>")
    assert table.special_ids == {eos, user}
    assert table.token_bytes(eos) == b""


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_bytes_are_the_text_with_the_space_that_is_put_before_it(text: str) -> None:
    tokenizer = sentencepiece()
    table = TokenTable.from_json(tokenizer.to_str())
    ids = table.encode(text)
    assert joined(table, ids).removeprefix(" ") == text == tokenizer.decode(ids)


def test_sentencepiece_byte_tokens_are_one_byte_each() -> None:
    tokenizer = sentencepiece()
    table = TokenTable.from_json(tokenizer.to_str())
    ids = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "한".encode()]
    assert [table.token_bytes(id_) for id_ in ids] == [bytes([byte]) for byte in "한".encode()]


def test_a_generated_word_keeps_its_space_where_decoding_it_alone_would_not() -> None:
    tokenizer = sentencepiece()
    table = TokenTable.from_json(tokenizer.to_str())
    ids = table.encode("left right")
    for cut in range(1, len(ids)):
        before, after = ids[:cut], ids[cut:]
        assert joined(table, before) + joined(table, after) == " left right"


@pytest.mark.parametrize("make", [metaspace, word_piece, end_of_word, words])
@pytest.mark.parametrize("text", ["left right", "def add ( left , right ) : 42", "one, two one"])
def test_other_decoders_agree_but_for_spaces_around_the_whole(make: object, text: str) -> None:
    assert callable(make)
    tokenizer = make()
    table = TokenTable.from_json(tokenizer.to_str())
    ids = table.encode(text)
    assert joined(table, ids).strip(" ") == tokenizer.decode(ids).strip(" ")


def test_ids_that_the_tokenizer_lacks_have_no_bytes() -> None:
    table = TokenTable.from_json(byte_level().to_str())
    assert table.token_bytes(table.size) == b""
    assert table.token_bytes(10**9) == b""


def test_encoding_adds_what_the_tokenizer_adds() -> None:
    tokenizer = byte_level()
    eos = id_of(tokenizer, "<eos>")
    tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", eos)])
    table = TokenTable.from_json(tokenizer.to_str())
    assert table.encode("a")[0] == eos
    assert len(table.encode("a")) == 2


def test_truncation_and_padding_of_the_file_do_not_apply() -> None:
    tokenizer = byte_level()
    plain = tokenizer.encode(TEXTS[0]).ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=1000)
    assert TokenTable.from_json(tokenizer.to_str()).encode(TEXTS[0]) == plain
    assert tokenizer.truncation is not None


def test_a_table_survives_its_json() -> None:
    table = TokenTable.from_json(byte_level().to_str())
    again = TokenTable.from_json(table.to_json())
    assert again.digest == table.digest
    assert again.encode(TEXTS[1]) == table.encode(TEXTS[1])


def test_the_digest_is_over_lines_of_id_and_token() -> None:
    lines = b"0\t<unk>\n1\tone\n2\ttwo\n3\t,\n"
    assert TokenTable.from_json(words().to_str()).digest == hashlib.sha256(lines).hexdigest()


def test_digests_differ_with_the_tokens_alone() -> None:
    one, other = byte_level(), byte_level()
    other.add_tokens(["<new>"])
    special = byte_level()
    special.pre_tokenizer = pre_tokenizers.Whitespace()
    digests = [TokenTable.from_json(tokenizer.to_str()).digest for tokenizer in (one, other, special)]
    assert digests[0] != digests[1]
    assert digests[0] == digests[2]


def test_size_and_longest_token_are_over_all_ids() -> None:
    tokenizer = byte_level()
    table = TokenTable.from_json(tokenizer.to_str())
    assert table.size == tokenizer.get_vocab_size(with_added_tokens=True)
    assert table.longest_token_bytes == max(len(table.token_bytes(id_)) for id_ in range(table.size)) >= 8


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '{"model": 3}'])
def test_an_invalid_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        TokenTable.from_json(text)


def stalled_s(work: Callable[[], object]) -> tuple[float, float]:
    """The longest time that another thread could not run, and how long the work took, in seconds."""
    ended = threading.Event()

    def run() -> None:
        work()
        ended.set()

    thread = threading.Thread(target=run)
    longest, began = 0.0, time.perf_counter()
    last = began
    thread.start()
    while not ended.is_set():
        time.sleep(0.0005)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    thread.join()
    return longest, last - began


def test_other_threads_run_while_a_text_is_tokenized() -> None:
    table = TokenTable.from_json(byte_level().to_str())
    text = "the cat sat on the mat, " * 40_000
    # A busy machine stalls threads as well.
    stalled, took = min(stalled_s(lambda: table.encode(text)) for _ in range(5))
    in_time(stalled < took / 3, (stalled, took))


def test_more_tokens_than_are_wanted_are_refused_whatever_the_texts_length() -> None:
    table = TokenTable.from_json(byte_level().to_str())
    ids = table.encode("the cat sat")
    assert table.encode("the cat sat", most=len(ids)) == ids
    with pytest.raises(TooManyTokens) as refused:
        table.encode("the cat sat", most=len(ids) - 1)
    assert refused.value.count == len(ids)
    with pytest.raises(TooManyTokens) as refused:
        table.encode("x\n" * 4_000_000, most=1_000)
    assert refused.value.count < 300_000, "the rest of the text was not looked at"


def test_a_long_text_of_few_tokens_is_tokenized_whole() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["long " * 5])
    table = TokenTable.from_json(tokenizer.to_str())
    text = "long " * 5 * 20_000
    ids = table.encode(text)
    assert len(text) > SCREENED * len(ids)
    assert table.encode(text, most=len(ids)) == ids
