"""What a source's drafting costs the target is found by steps in which the source is left alone."""

from collections.abc import Callable, Sequence

from outrider.wire.names import EDGE
from speculative.params import SamplingParams
from verifier_service.engine.source_policy import Reputations
from verifier_service.remote_sources.source_presence import PresenceTrials, SourcePresence

STEP_S = 0.02
Speed = Callable[[int, Sequence[SourcePresence]], float]
"""The seconds of a step, by its number and the sources that are followed."""


class Steps:
    """Steps of one or more sessions that all use the same sources."""

    def __init__(self, *presences: SourcePresence, sessions: int = 1, users: int = 1) -> None:
        self.presences, self.sessions, self.users = presences, sessions, users
        self.trials = PresenceTrials()
        self.paused: list[list[str]] = []
        self._now = 5.0

    def run(self, count: int, seconds: Speed, work: float = 20.0, used: bool = True) -> None:
        for _ in range(count):
            followed = [presence for presence in self.presences if used and not presence.paused]
            self.paused.append([presence.names[0] for presence in self.presences if presence.paused])
            self._now += seconds(len(self.paused), followed)
            uses = [(presence, presence in followed) for presence in self.presences] * self.users
            self.trials.stepped(self._now, self.sessions, uses if used else (), work)


def slowed(*by: tuple[SourcePresence, float]) -> Speed:
    """Steps that take so many times as long for each source that is followed."""

    def seconds(number: int, followed: Sequence[SourcePresence]) -> float:
        took = STEP_S
        for presence, factor in by:
            took *= factor if presence in followed else 1.0
        return took

    return seconds


def test_a_source_costs_the_part_of_their_speed_that_steps_lose_by_it() -> None:
    drafter = SourcePresence(("drafter",))
    Steps(drafter).run(300, slowed((drafter, 1.5)))
    assert abs(drafter.cost(1) - 1 / 3) < 0.01
    assert drafter.cost(8) == 0.0, "nothing is known of steps with eight sessions"


def test_a_source_on_another_machine_costs_nothing() -> None:
    drafter = SourcePresence(("drafter",))
    Steps(drafter).run(300, slowed())
    assert drafter.cost(1) == 0.0


def test_a_source_that_slows_all_sessions_for_the_sake_of_few_has_to_gain_more_for_these() -> None:
    drafter = SourcePresence(("drafter",))
    Steps(drafter, sessions=4, users=2).run(300, slowed((drafter, 1.25)))
    assert abs(drafter.loss(4) - 0.2) < 0.01
    assert abs(drafter.cost(4) - 0.4) < 0.02


def test_of_two_sources_each_is_charged_with_its_own_part() -> None:
    near, far = SourcePresence(("near",)), SourcePresence(("far",))
    steps = Steps(near, far)
    steps.run(600, slowed((near, 1.5)))
    assert abs(near.cost(1) - 1 / 3) < 0.01
    assert far.cost(1) < 0.01
    assert ["near", "far"] not in steps.paused, "one trial at a time"
    assert ["near"] in steps.paused
    assert ["far"] in steps.paused


def test_a_neighbour_that_slows_the_machine_is_not_the_sources_fault() -> None:
    drafter = SourcePresence(("drafter",))
    Steps(drafter).run(800, lambda number, followed: STEP_S * (2.0 if number > 400 else 1.0))
    assert drafter.cost(1) < 0.02


def test_a_source_that_moves_away_is_cheap_in_time() -> None:
    drafter = SourcePresence(("drafter",))
    steps = Steps(drafter)
    steps.run(300, slowed((drafter, 2.0)))
    assert drafter.cost(1) > 0.4
    steps.run(2500, slowed())
    assert drafter.cost(1) < 0.1


def test_steps_that_something_else_holds_up_do_not_count() -> None:
    drafter = SourcePresence(("drafter",))
    even = slowed((drafter, 1.25))
    Steps(drafter).run(300, lambda number, followed: even(number, followed) + 5.0 * (number % 7 == 0))
    assert abs(drafter.cost(1) - 0.2) < 0.01


def test_trials_get_rare() -> None:
    drafter = SourcePresence(("drafter",))
    steps = Steps(drafter)
    steps.run(4000, slowed((drafter, 1.5)))
    paused = [bool(names) for names in steps.paused]
    assert sum(paused[:500]) <= 24
    assert 6 <= sum(paused[1000:]) <= 24


def test_steps_that_lack_the_source_anyway_take_the_place_of_trials() -> None:
    drafter = SourcePresence(("drafter",))
    steps = Steps(drafter)
    for _ in range(20):
        steps.run(6, slowed((drafter, 1.5)))
        steps.run(10, slowed((drafter, 1.5)), used=False)
    assert not any(steps.paused)
    assert abs(drafter.cost(1) - 1 / 3) < 0.01


def test_steps_that_cannot_be_compared_lead_to_no_trial() -> None:
    drafter = SourcePresence(("drafter",))
    steps = Steps(drafter)
    steps.run(500, slowed((drafter, 1.5)), work=0.0)
    Steps(drafter).run(500, lambda number, followed: 0.0)
    assert not any(steps.paused)
    assert drafter.cost(1) == 0.0


def test_time_in_which_the_engine_is_idle_counts_for_no_step() -> None:
    drafter = SourcePresence(("drafter",))
    steps = Steps(drafter)
    for _ in range(10):
        steps.trials.idle()
        steps.run(1, lambda number, followed: 10.0)
        steps.run(30, slowed((drafter, 1.25)))
    assert abs(drafter.cost(1) - 0.2) < 0.01


def test_a_trial_ends_with_the_last_session_that_uses_the_source() -> None:
    near, far = SourcePresence(("near",)), SourcePresence(("far",))
    steps = Steps(near, far)
    while not near.paused:
        steps.run(1, slowed())
    steps.run(1, slowed(), used=False)
    assert not near.paused


def test_the_sources_that_are_compared_are_bounded() -> None:
    many = [SourcePresence((str(number),)) for number in range(100)]
    steps = Steps(*many)
    steps.run(3, slowed())
    assert len(steps.trials.known) <= 32


def test_sampled_and_greedy_sessions_share_what_a_source_costs_and_devices_have_no_share_in_it() -> None:
    reputations = Reputations()
    greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)
    shared = reputations.of_address(["drafter"], greedy).presence
    assert shared is not None
    assert reputations.of_address(["drafter"], sampled).presence is shared
    assert reputations.of_address([EDGE], greedy).presence is None


def test_a_source_in_use_is_known_however_many_names_clients_make_up() -> None:
    reputations, sampled = Reputations(), SamplingParams(temperature=0.8)
    own, presence = reputations.of("drafter", sampled), reputations.of_address(["drafter"], sampled).presence
    for number in range(2000):
        reputations.of(f"made up {number}", sampled)
        reputations.of_address([f"made up {number}"], sampled)
        assert reputations.of("drafter", sampled) is own
        assert reputations.of_address(["drafter"], sampled).presence is presence


def test_until_it_has_been_compared_a_source_is_taken_to_cost_something() -> None:
    drafter = SourcePresence(("drafter",))
    steps = Steps(drafter)
    steps.run(2, slowed())
    assert 0.0 < drafter.cost(1) < 0.3
    steps.run(60, slowed())
    assert drafter.cost(1) == 0.0


def test_what_saves_little_is_compared_within_the_first_twenty_steps() -> None:
    useful, useless = SourcePresence(("drafter",)), SourcePresence(("drafter",))
    for _ in range(3):
        useless.saved(0.0)
    for presence in (useful, useless):
        Steps(presence).run(20, slowed((presence, 1.5)))
    assert abs(useless.cost(1) - 1 / 3) < 0.01
    assert useful.measured(1) is None, "it would stay in any case"


def test_sources_at_one_address_are_measured_together() -> None:
    reputations = Reputations()
    sampled = SamplingParams(temperature=0.8)
    one, other = (
        reputations.of_address(names, sampled) for names in (["corpus", "past"], ["past", "corpus"])
    )
    assert one.presence is other.presence
    assert one.activity is other.activity
    assert reputations.of_address(["past"], sampled).presence is not one.presence
