"""How deep a batched proposer drafts: as deep as its milliseconds pay."""

from verifier_service.proposers.price import ProposerPrice


def taught(*levels: tuple[float, float], seeing_ms: float = 0.0) -> ProposerPrice:
    """A price that has seen these levels (ms, survival gained) often, over one session."""
    price = ProposerPrice()
    for _ in range(100):
        for level, (ms, gain) in enumerate(levels):
            price.computed(level, ms, gain, sessions=1)
        price.saw(seeing_ms)
    return price


def begun(price: ProposerPrice, steps: int, tokens_per_ms: float, sessions: int = 1) -> list[bool]:
    return [price.begins(sessions, tokens_per_ms) for _ in range(steps)]


def test_an_unknown_level_is_tried() -> None:
    assert ProposerPrice().pays(0, 1, 1.0)
    assert taught((1.0, 0.5)).pays(1, 1, 1.0, before=0.5)


def test_a_level_pays_where_its_gain_exceeds_what_its_time_would_yield() -> None:
    price = taught((2.0, 0.5))
    assert price.pays(0, 1, tokens_per_ms=0.2)
    assert not price.pays(0, 1, tokens_per_ms=0.3)
    assert price.pays(0, 8, tokens_per_ms=0.3), "one call serves all sessions"


def test_a_deeper_level_is_expected_to_gain_less_below_a_poor_one() -> None:
    price = taught((1.0, 0.8), (1.0, 0.4))
    assert price.pays(1, 1, 0.3, before=0.8)
    assert not price.pays(1, 1, 0.3, before=0.2)


def test_showing_passes_is_a_part_of_the_first_level_s_price() -> None:
    assert taught((1.0, 0.5)).pays(0, 1, 0.3)
    assert not taught((1.0, 0.5), seeing_ms=1.0).pays(0, 1, 0.3)


def test_one_that_does_not_pay_rests_longer_and_longer_and_is_tried_again() -> None:
    price = taught((10.0, 0.1))
    steps = begun(price, 700, tokens_per_ms=0.1)
    assert not all(steps)
    rests = [len(run) for run in "".join("x" if asked else "-" for asked in steps).split("x") if run]
    assert rests[:4] == [17, 33, 65, 129], "doubling; the step that decides is one of them"
    assert sum(steps) <= 30


def test_one_that_pays_again_is_asked_in_every_step() -> None:
    price = taught((10.0, 0.1))
    begun(price, 40, tokens_per_ms=0.1)
    for _ in range(200):
        price.computed(0, 0.1, 0.9, sessions=1)
    steps = begun(price, 300, tokens_per_ms=0.1)
    assert all(steps[64:])
