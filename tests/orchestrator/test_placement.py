"""Where a session goes, without any connection."""

import pytest

from orchestrator.placement import (
    ChosenSource,
    Drafting,
    Worker,
    choose_sources,
    fitting_sources,
    ranked,
    source_names,
)
from speculative.errors import InvalidRequest

LOCAL = ("lookup",)


def drafting(
    address: str, *, name: str = "drafter", digest: str = "d", sessions: int = 0, up: bool = True
) -> Drafting:
    return Drafting(address, name, digest, sessions, up)


def test_the_verifier_with_the_fewest_sessions_comes_first() -> None:
    workers = [Worker("a", "m", 3, True), Worker("b", "m", 1, True), Worker("c", "m", 2, True)]
    assert [worker.address for worker in ranked(workers, "m")] == ["b", "c", "a"]


def test_neither_other_models_nor_unreachable_verifiers_are_candidates() -> None:
    assert ranked([Worker("a", "other", 0, True), Worker("b", "m", 0, False)], "m") == []


def test_a_source_fits_by_its_tokenizer_or_by_having_none() -> None:
    sources = [drafting("a"), drafting("b", digest="x"), drafting("c", digest="")]
    assert [source.address for source in fitting_sources(sources, "d")] == ["a", "c"]


def test_one_source_is_chosen_per_name_and_the_verifiers_own_come_first() -> None:
    fitting = [drafting("a", sessions=2), drafting("b", sessions=1), drafting("c", name="corpus")]
    assert source_names(LOCAL, fitting) == ("lookup", "drafter", "corpus")
    assert choose_sources(LOCAL, fitting, ()) == (
        ChosenSource("lookup", ""),
        ChosenSource("drafter", "b"),
        ChosenSource("corpus", "c"),
    )


def test_equals_take_turns() -> None:
    fitting = [drafting("a"), drafting("b")]
    chosen = [choose_sources((), fitting, (), turn=turn)[0].address for turn in range(4)]
    assert chosen == ["a", "b", "a", "b"]


def test_one_that_cannot_be_reached_is_named_only_where_there_is_no_other() -> None:
    away, there = drafting("a", up=False), drafting("b", sessions=9)
    assert choose_sources((), [away, there], ())[0].address == "b"
    assert choose_sources((), [away], ())[0].address == "a"


def test_only_the_wanted_names_are_used() -> None:
    assert choose_sources(LOCAL, [drafting("a")], ["lookup"]) == (ChosenSource("lookup", ""),)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"'dreams'.*lookup, drafter"):
        choose_sources(LOCAL, [drafting("a")], ["lookup", "dreams"])
    with pytest.raises(InvalidRequest, match="none"):
        choose_sources((), [], ["lookup"])
