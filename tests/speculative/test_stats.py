import pytest

from speculative.stats import UsageCount


def test_a_round_counts_what_was_delivered() -> None:
    usage = UsageCount(prompt_tokens=5, source_names=("lookup", "drafter"))
    usage.record_round(0, (), admitted=0)
    assert (usage.rounds, usage.acceptance_length) == (0, 0.0)
    usage.record_round(1, (0,), admitted=0)
    usage.record_round(4, (2, 2, 1, 0), admitted=16)
    assert usage.completion_tokens == 5
    assert usage.rounds == 2
    assert usage.admitted == 16
    assert usage.accepted == {"drafter": 2, "lookup": 1}
    assert usage.acceptance_length == 2.5


def test_accepted_and_the_targets_own_tokens_make_up_the_completion() -> None:
    usage = UsageCount(prompt_tokens=1, source_names=("lookup",))
    for token_sources in [(0,), (1, 1, 0), (1,)]:
        usage.record_round(len(token_sources), token_sources, admitted=2)
    assert sum(usage.accepted.values()) == usage.completion_tokens - 2


def test_plain_decoding_has_an_acceptance_length_of_exactly_1() -> None:
    usage = UsageCount(prompt_tokens=1)
    for _ in range(49):
        usage.record_round(1, (0,), admitted=0)
    assert usage.acceptance_length == 1.0


def test_every_committed_id_has_a_source() -> None:
    with pytest.raises(AssertionError, match="token_sources"):
        UsageCount(prompt_tokens=1).record_round(2, (0,), admitted=0)
