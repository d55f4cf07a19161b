"""Which verifier a session goes to, without any connection."""

from dataclasses import replace

import pytest

from orchestrator.fleet.placement import (
    ChosenSource,
    SourceInfo,
    VerifierInfo,
    choose_sources,
    compatible_sources,
    rank_verifiers,
    replace_sources,
    source_names,
    sources_at,
    useful_names,
)
from outrider.wire.names import MAX_SOURCES
from speculative.errors import InvalidRequest

LOCAL = ("lookup",)


def drafting(
    address: str, *, name: str = "drafter", digest: str = "d", sessions: int = 0, up: bool = True
) -> SourceInfo:
    return SourceInfo(address, name, digest, sessions, up)


def test_the_verifier_with_the_fewest_sessions_comes_first() -> None:
    workers = [
        VerifierInfo("a", "m", 3, True),
        VerifierInfo("b", "m", 1, True),
        VerifierInfo("c", "m", 2, True),
    ]
    assert [worker.address for worker in rank_verifiers(workers, "m")] == ["b", "c", "a"]


def test_neither_other_models_nor_unreachable_verifiers_are_candidates() -> None:
    assert rank_verifiers([VerifierInfo("a", "other", 0, True), VerifierInfo("b", "m", 0, False)], "m") == []


def test_a_source_fits_by_its_tokenizer_or_by_having_none() -> None:
    sources = [drafting("a"), drafting("b", digest="x"), drafting("c", digest="")]
    assert [source.address for source in compatible_sources(sources, "d")] == ["a", "c"]


def test_a_source_of_one_tenant_fits_that_tenants_sessions_alone_and_goes_before_others() -> None:
    own = replace(drafting("own", sessions=5), tenant="ann")
    sources = [drafting("any"), own]
    assert compatible_sources(sources, "d", "ann") == sources
    assert choose_sources((), compatible_sources(sources, "d", "ann"), ()) == (
        ChosenSource("drafter", "own"),
    )
    for other in ("bob", ""):
        assert compatible_sources(sources, "d", other) == [drafting("any")]
        assert compatible_sources([own], "d", other) == []


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


@pytest.mark.parametrize(
    ("name", "wants"),
    [("grammar", "a schema"), ("prediction", "a predicted answer"), ("references", "texts")],
)
def test_a_source_that_has_nothing_to_draft_from_is_refused_by_what_it_needs(name: str, wants: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{name}', which drafts from .*{wants}.*the request has none"):
        choose_sources(LOCAL, [], [name], idle={"grammar", "prediction", "references"})


def test_a_verifier_is_given_no_source_that_only_another_one_has_inside() -> None:
    chosen = (ChosenSource("lookup", ""), ChosenSource("grammar", ""), ChosenSource("corpus", "c"))
    assert sources_at(chosen, ("lookup", "grammar")) == chosen
    assert sources_at(chosen, ("lookup",)) == (chosen[0], chosen[2]), "it is of an older release"
    own = sources_at(chosen, ("lookup", "grammar", "corpus"))
    assert own[2] == ChosenSource("corpus", ""), "a name inside a verifier is the verifier's own"


def order(*workers: VerifierInfo, **how: str) -> list[str]:
    return [worker.address for worker in rank_verifiers(workers, "m", **how)]


def test_it_is_the_share_of_what_a_verifier_takes_that_counts() -> None:
    assert order(VerifierInfo("a", "m", 8, True, 16), VerifierInfo("b", "m", 12, True, 64)) == ["b", "a"]
    unknown, small = VerifierInfo("a", "m", 3, True), VerifierInfo("b", "m", 3, True, 8)
    assert order(small, unknown, VerifierInfo("c", "m", 60, True, 64)) == ["a", "b", "c"]


def test_one_that_is_full_comes_last_but_where_it_has_the_session() -> None:
    full, busy = VerifierInfo("a", "m", 2, True, 2), VerifierInfo("b", "m", 63, True, 64, step_s=0.5)
    other = VerifierInfo("c", "m", 0, True, 64, step_s=0.01)
    assert order(full, busy, other) == ["c", "b", "a"]
    assert order(full, busy, other, preferred="a")[0] == "a"


def test_slower_steps_weigh_as_sessions_do_but_only_where_they_are_twice_as_long() -> None:
    fast, slow = VerifierInfo("a", "m", 1, True, 8, 0.010), VerifierInfo("b", "m", 0, True, 8, 0.013)
    assert order(fast, slow) == ["b", "a"], "that may be noise"
    slow = VerifierInfo("b", "m", 0, True, 8, 0.040)
    assert order(fast, slow) == ["a", "b"]
    new = VerifierInfo("c", "m", 0, True, 8)
    assert order(fast, slow, new) == ["c", "a", "b"], "who has not been measured counts as the fastest"


def test_one_that_is_about_to_end_gets_no_session() -> None:
    assert order(VerifierInfo("a", "m", 0, True, draining=True), VerifierInfo("b", "m", 9, True)) == ["b"]
    assert order(VerifierInfo("a", "m", 0, True, draining=True), preferred="a") == []


def test_a_prefix_is_worth_some_sessions() -> None:
    assert order(VerifierInfo("a", "m", 0, True), VerifierInfo("b", "m", 4, True), near="b") == ["b", "a"]
    assert order(VerifierInfo("a", "m", 0, True), VerifierInfo("b", "m", 5, True), near="b") == ["a", "b"]


def test_what_was_begun_goes_on_with_the_same_numerics_where_it_can() -> None:
    gpu, cpu = (
        VerifierInfo("a", "m", 0, True, numerics="cuda"),
        VerifierInfo("b", "m", 9, True, numerics="cpu"),
    )
    assert order(gpu, cpu, numerics="cpu") == ["b", "a"]
    assert order(gpu, cpu) == ["a", "b"]


def test_drafters_are_taken_by_their_share_too() -> None:
    small = SourceInfo("a", "drafter", "d", 4, True, capacity=8)
    large = SourceInfo("b", "drafter", "d", 8, True, capacity=64)
    ending = SourceInfo("c", "drafter", "d", 0, True, capacity=64, draining=True)
    assert choose_sources((), [small, large, ending], ())[0].address == "b"
    assert choose_sources((), [ending], ())[0].address == "c", "better than none"


CHOSEN = (ChosenSource("lookup", ""), ChosenSource("drafter", "a"), ChosenSource("corpus", "r"))


def test_sources_that_serve_well_stay_whatever_others_there_are() -> None:
    fitting = [drafting("a", sessions=9), drafting("b"), drafting("r", name="corpus")]
    assert replace_sources(CHOSEN, fitting) == CHOSEN


@pytest.mark.parametrize("how", ["gone", "away", "draining"])
def test_a_source_that_is_lost_gives_way_to_the_least_burdened_of_its_name(how: str) -> None:
    lost = {
        "gone": [],
        "away": [drafting("a", up=False)],
        "draining": [SourceInfo("a", "drafter", "d", 0, True, draining=True)],
    }[how]
    others = [drafting("b", sessions=2), drafting("c", sessions=1), drafting("x", up=False)]
    after = replace_sources(CHOSEN, [*lost, *others, drafting("r", name="corpus")])
    assert after == (CHOSEN[0], ChosenSource("drafter", "c"), CHOSEN[2])


def test_a_lost_source_without_another_is_kept_in_case_it_comes_back() -> None:
    assert replace_sources(CHOSEN, [drafting("b", up=False), drafting("a", up=False)]) == CHOSEN
    assert replace_sources(CHOSEN, []) == CHOSEN


def paced(
    address: str, step_ms: float, way_ms: float = 0.5, sessions: int = 0, capacity: int = 0
) -> SourceInfo:
    return SourceInfo(
        address, "drafter", "d", sessions, True, capacity, step_ms / 1000, round_trip_s=way_ms / 1000
    )


def test_a_drafter_far_away_is_chosen_once_the_near_one_is_loaded_by_as_much() -> None:
    near, far = paced("near", 2.0), paced("far", 2.0, way_ms=6.0)
    assert choose_sources((), [far, near], ())[0].address == "near"
    assert choose_sources((), [far, replace(near, sessions=2)], ())[0].address == "near"
    assert choose_sources((), [far, replace(near, sessions=4)], ())[0].address == "far"


def test_round_trips_within_one_place_are_no_distance() -> None:
    quick, slow = paced("a", 1.0, way_ms=0.2, sessions=1), paced("b", 1.0, way_ms=1.9)
    assert choose_sources((), [quick, slow], ())[0].address == "b"


def test_a_drafter_whose_step_is_not_known_counts_as_the_fastest() -> None:
    known, fresh = paced("a", 8.0, sessions=1), paced("b", 0.0)
    assert choose_sources((), [known, fresh], ())[0].address == "b"
    assert choose_sources((), [known, replace(fresh, round_trip_s=0.1)], ())[0].address == "a"


OF_A = (ChosenSource("drafter", "a"),)
OF_B = (ChosenSource("drafter", "b"),)


@pytest.mark.parametrize(
    "lagging", [paced("a", 20.0), paced("a", 2.0, way_ms=30.0)], ids=["slow steps", "far away"]
)
def test_a_session_leaves_a_drafter_that_lags(lagging: SourceInfo) -> None:
    assert replace_sources(OF_A, [lagging, paced("b", 2.0)]) == OF_B
    assert replace_sources(OF_B, [lagging, paced("b", 2.0)]) == OF_B, "and does not come back"
    assert replace_sources(OF_A, [lagging, paced("b", 2.0)], staying={"a"}) == OF_A, "one at a time"


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (paced("a", 6.0), paced("b", 2.0)),
        (paced("a", 4.0), paced("b", 0.5)),
        (paced("a", 20.0), paced("b", 0.0)),
        (paced("a", 20.0), paced("b", 2.0, sessions=8, capacity=8)),
    ],
    ids=["not much slower", "a few ms", "nothing known of the other", "the other is full"],
)
def test_a_session_stays_where_it_would_gain_little_or_nothing_is_known(
    mine: SourceInfo, other: SourceInfo
) -> None:
    assert replace_sources(OF_A, [mine, other]) == OF_A


def test_the_sessions_of_a_lagging_drafter_spread_over_the_pool() -> None:
    sessions = [OF_A] * 12
    for turn in range(40):  # one leaves at a time; a drafter's step grows with its sessions
        count = {address: sum(it[0].address == address for it in sessions) for address in "abc"}
        pool = [paced(address, 2.0 + 2.0 * count[address], sessions=count[address]) for address in "abc"]
        for place, session in enumerate(sessions):
            instead = replace_sources(session, pool, turn=turn)
            if instead != session:
                sessions[place] = instead
                break
    held = [sum(it[0].address == address for it in sessions) for address in "abc"]
    assert max(held) <= 4 * (min(held) + 1)
    assert sum(held) == 12


def many(count: int, name: str = "stranger") -> list[SourceInfo]:
    return [drafting(f"s:{number}", name=f"{name}{number}") for number in range(count)]


def test_a_request_that_names_no_source_gets_as_many_as_a_verifier_takes() -> None:
    assert len(choose_sources(LOCAL, many(MAX_SOURCES - 1), ())) == MAX_SOURCES
    chosen = [source.name for source in choose_sources(LOCAL, many(MAX_SOURCES + 40), ())]
    assert chosen == ["lookup", *(f"stranger{number}" for number in range(MAX_SOURCES - 1))]


def test_of_too_many_sources_those_that_have_drafted_well_and_answer_are_named() -> None:
    good = replace(drafting("d", name="good"), proven=True)
    lost = replace(drafting("l", name="lost", up=False), proven=True)
    away = [replace(source, reachable=False) for source in many(3, "away")]
    remote = [*away, *many(MAX_SOURCES - 2), lost, good]
    assert useful_names(LOCAL, remote) == (
        "lookup",
        *(f"stranger{number}" for number in range(MAX_SOURCES - 2)),
        "good",
    )
    assert useful_names((), [*away, lost]) == ("away0", "away1", "away2", "lost"), "where there is room"


def test_a_worker_of_many_names_takes_no_other_worker_s_place() -> None:
    greedy = [replace(drafting("g"), name=f"greedy{rank}", rank=rank) for rank in range(40)]
    remote = [*greedy, drafting("a"), drafting("b", name="corpus")]
    assert set(useful_names(LOCAL, remote)) == {
        "lookup",
        *(f"greedy{rank}" for rank in range(MAX_SOURCES - 3)),
        "drafter",
        "corpus",
    }


def test_any_of_too_many_sources_can_be_asked_for_but_not_too_many_at_once() -> None:
    remote = many(40)
    assert [source.name for source in choose_sources((), remote, ["stranger39"])] == ["stranger39"]
    with pytest.raises(InvalidRequest, match=r"names 17 sources; name at most 16"):
        choose_sources((), remote, [source.name for source in remote[:17]])
    with pytest.raises(InvalidRequest, match=r"stranger15 and 24 more"):
        choose_sources((), remote, ["dreams"])
