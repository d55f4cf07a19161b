"""Recommendations for a pair, and their reasons."""

from outrider.pair.advice import Drafting, advise, kv_mb


def measured(**by_nodes: tuple[float, float]) -> list[Drafting]:
    """Speedups, greedy and sampled, by limit of nodes: n4=(2.0, 1.5)."""
    return [
        Drafting(temperature, int(nodes[1:]), 2.0, speedup)
        for nodes, speedups in by_nodes.items()
        for temperature, speedup in zip((0.0, 0.8), speedups, strict=True)
    ]


def test_the_limit_with_the_highest_speedup_is_recommended() -> None:
    found = advise(measured(n4=(1.5, 1.2), n8=(2.0, 1.3), n16=(1.8, 1.2)))
    assert (found.drafter, found.nodes) == (True, 8)
    assert 1.61 < found.expected_speedup < 1.62


def test_the_smallest_of_about_equal_limits_is_recommended() -> None:
    assert advise(measured(n4=(1.99, 1.3), n8=(2.0, 1.3))).nodes == 4


def test_a_drafter_without_a_speedup_is_not_recommended() -> None:
    found = advise(measured(n4=(1.1, 0.95), n8=(1.0, 0.9)))
    assert (found.drafter, found.nodes, found.expected_speedup) == (False, 0, 1.0)
    assert "1.02 times" in found.why


def test_a_drafter_without_measurements_is_not_recommended() -> None:
    assert not advise([]).drafter


def test_keys_and_values_have_room_for_eight_long_requests_or_a_quarter_of_the_memory() -> None:
    assert kv_mb(128 * 1024, 8192, memory_mb=1_000_000) == 8192
    assert kv_mb(128 * 1024, 8192, memory_mb=16_000) == 4000
    assert kv_mb(512, 256, memory_mb=16_000) == 64
