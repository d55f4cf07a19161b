"""Texts that come with a request to be copied from: checked, tokenized, and handed to the verifier."""

from typing import Any

import openai
import pytest

from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.copied_texts import encode_copied, last_document, with_document
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest
from tests.orchestrator.conftest import World
from tests.orchestrator.front.test_http_completions import HI, asking

EDIT = {"speculation": {"edit": True}}
MARKED = "a\n```py\nbc\n```\nd\n"


@pytest.mark.parametrize(
    ("prompt", "document"),
    [
        ("rename x:\n```python\nx = 1\n```\n", "x = 1\n"),
        ("```\nfirst\n```\nand\n~~~\nsecond\n~~~\n", "second\n"),
        ("do it:\n```\nx = 1\n```\nanswer:\n```\n", "x = 1\n"),
        ("````md\n```\nx\n```\n````", "```\nx\n```\n"),
        ("```\nx\n~~~\ny\n```", "x\n~~~\ny\n"),
        ("  ```\nx\n  ```", "x\n"),
        ("no marks", "no marks"),
        ("one mark alone\n```\nx", "one mark alone\n```\nx"),
        ("```\n```", ""),
        ("", ""),
    ],
)
def test_the_last_document_is_the_last_whole_block_or_the_prompt(prompt: str, document: str) -> None:
    assert last_document(prompt) == document


async def test_references_reach_the_verifier_in_order(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, front):
        await client.completions.create(
            model="toy", prompt="abc", max_tokens=2, extra_body={"references": ["de", "", "fgh"]}
        )
        await client.chat.completions.create(
            model="toy", messages=HI, max_tokens=2, extra_body={"references": ["de"]}
        )
        await front.client.generate("abc", max_tokens=2, references=["de", "fgh"], prediction="i")
        await front.client.generate("abc", max_tokens=2, references="de")
        await front.client.generate("abc", max_tokens=2)
        await front.client.generate("abc", max_tokens=2, regex="a+")
    de, fgh = table.encode("de"), table.encode("fgh")
    assert [[list(text.ids) for text in it.references] for it in verifier.opened] == [
        [de, fgh],
        [de],
        [de, fgh],
        [de],
        [],
        [],
    ]
    names = [[source.name for source in it.sources] for it in verifier.opened]
    assert names == [
        ["lookup", "references"],
        ["lookup", "references"],
        ["lookup", "prediction", "references"],
        ["lookup", "references"],
        ["lookup"],
        ["lookup", "grammar"],
    ]


async def test_an_edit_makes_the_prompts_last_document_a_reference(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, front):
        await client.completions.create(
            model="toy",
            prompt=[MARKED, "xyz"],
            max_tokens=2,
            extra_body={"references": ["de"], **EDIT},
        )
        await client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": MARKED}], max_tokens=2, extra_body=EDIT
        )
        await front.client.generate(MARKED, max_tokens=2, edit=True)
    found = sorted([list(text.ids) for text in it.references] for it in verifier.opened)
    document = table.encode("bc\n")
    assert found == sorted(
        [[table.encode("de"), document], [table.encode("de"), table.encode("xyz")], [document], [document]]
    )


async def test_a_session_that_moves_keeps_its_references(world: Any, table: TokenTable) -> None:
    first = await world.verifier(per_tick=1, tick_s=0.02, tokens=table)
    second = await world.verifier(per_tick=1, tick_s=0.02, tokens=table)
    front = await world.front([first.address, second.address])
    for verifier in (first, second):
        await world.until(lambda at=verifier.address: front.sample("peer_up", peer=at))
    await world.ready(front)
    stream = front.client.stream("abc", max_tokens=40, references=["de", "f"], seed=7)
    await anext(stream)
    await first.server.stop(0)
    assert (await stream.completion()).usage.recoveries == 1
    (before,), (after,) = first.opened, second.opened
    assert after.references == before.references
    assert [list(text.ids) for text in after.references] == [table.encode("de"), table.encode("f")]
    assert after.sources == before.sources


async def test_without_speculation_references_go_nowhere(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (_, verifier, front):
        await front.client.generate("abc", max_tokens=2, references=["de"], edit=True, speculation=False)
    (plain,) = verifier.opened
    assert (list(plain.references), list(plain.sources)) == ([], [])


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"references": ["x"] * 17}, "references", "references has 17 texts; at most 16 are possible"),
    ({"references": ["x", 5]}, "references[1]", "references"),
    ({"references": "x"}, "references", "references"),
    ({"references": ["x" * 64]}, "references", r"references\[0\] has at least 64 ids"),
    (
        {"references": ["x" * 40, "y" * 24]},
        "references",
        r"references\[1\] has at least 24 ids beside 40 ids of the other texts .* fewer than 64",
    ),
    (
        {"references": ["x" * 32], "prediction": {"type": "content", "content": "y" * 32}},
        "references",
        r"references\[0\] has at least 32 ids beside 32 ids",
    ),
    ({"references": ["x" * 3000, "y" * 3000]}, "references", "6000 characters together"),
    ({"references": ["x"] * 16, **EDIT}, "speculation.edit", "adds a reference"),
    ({"prompt": [5, 6], **EDIT}, "speculation.edit", "give the prompt as text"),
    ({"references": ["x" * 62], **EDIT}, "speculation.edit", "beside 62 ids"),
]


async def test_what_cannot_be_references_is_refused_by_name(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, _):
        for fields, param, says in REFUSED:
            body = {"model": "toy", "prompt": "abc", "max_tokens": 2} | fields
            with pytest.raises(openai.BadRequestError, match=says) as refused:
                await client.post("/completions", body=body, cast_to=object)
            assert refused.value.param == param, fields
    assert not verifier.opened


async def test_a_reference_of_a_million_tokens_is_refused_cheaply(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, front):
        with pytest.raises(
            InvalidRequest,
            match="the message is too large",
        ):
            await front.client.generate("abc", max_tokens=2, references=["x" * 1_000_000])
        with pytest.raises(openai.APIStatusError) as refused:
            await client.completions.create(
                model="toy", prompt="abc", max_tokens=2, extra_body={"references": ["x " * 1_000_000]}
            )
    assert refused.value.status_code in (400, 413)
    assert not verifier.opened


async def test_over_grpc_too_many_or_too_long_texts_are_refused(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (_, verifier, front):
        for options, says in (
            ({"references": ["x"] * 17}, "references has 17 texts"),
            ({"references": ["x" * 40, "y" * 24]}, r"references\[1\] has at least 24 ids"),
            (
                {"references": ["x"] * 16, "edit": True},
                "speculation.edit is true, which adds a reference to",
            ),
        ):
            with pytest.raises(InvalidRequest, match=says):
                await front.client.generate("abc", max_tokens=2, **options)
        with pytest.raises(InvalidRequest, match=r"speculation\.edit is true beside a prompt of ids"):
            await front.client.generate(ids=[5], max_tokens=2, edit=True)
    assert not verifier.opened


async def test_a_model_without_a_tokenizer_takes_no_texts() -> None:
    bare = TargetModel("toy", 64, 96, "", None, ())
    with pytest.raises(InvalidRequest, match=r"references\[0\] cannot be used: model 'toy' has no tokenizer"):
        await encode_copied("", ["x"], bare)
    copied = await encode_copied("", ["", ""], bare)
    with pytest.raises(InvalidRequest, match=r"speculation\.edit cannot be used"):
        await with_document(copied, "x", bare)
