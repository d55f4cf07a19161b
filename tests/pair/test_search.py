"""The search of a drafter's settings: it finds the fastest along each, and tries none twice."""

from itertools import product

from drafter_service.draft_tree import Growth
from drafter_service.settings import DrafterSettings
from outrider.pair.search import CHOICES, DrafterTuning, search_tuning


def speed(tuning: DrafterTuning) -> float:
    """A machine whose best width depends on the number of children."""
    width = (tuning.nodes_per_pass - tuning.children - 1) ** 2 / 40
    return 2.0 - width - (tuning.scale - 1.0) ** 2 / 3 - (tuning.children - 2) ** 2 / 50


def test_the_found_settings_are_within_three_hundredths_of_the_best_of_the_whole_grid() -> None:
    grid = [DrafterTuning(**dict(zip(CHOICES, values, strict=True))) for values in product(*CHOICES.values())]
    found = search_tuning(speed)
    assert found.speedup >= 0.97 * max(map(speed, grid))
    assert found.speedup == speed(found.tuning)
    assert found.default_speedup == speed(DrafterTuning())
    assert found.tried < len(grid) / 3


def test_no_setting_is_measured_twice() -> None:
    seen: list[DrafterTuning] = []

    def measure(tuning: DrafterTuning) -> float:
        seen.append(tuning)
        return speed(tuning)

    assert search_tuning(measure).tried == len(seen) == len(set(seen))


def test_the_defaults_stay_where_nothing_gains() -> None:
    found = search_tuning(lambda tuning: 1.5 + 0.001 * tuning.children)
    assert found.tuning == DrafterTuning()


def test_the_defaults_are_those_of_the_drafter() -> None:
    settings = DrafterSettings(model="m")
    assert DrafterTuning().nodes_per_pass == settings.nodes_per_pass
    assert DrafterTuning().growth == settings.growth == Growth()
