"""The replay of texts against the retrieval worker counts what a verifier would accept."""

from benchmarks.retrieval.memories_together import Recorded, Rounds
from retrieval_service.catalogue import PAST, Catalogue
from retrieval_service.past.outputs import PastOutputs
from speculative.params import SamplingParams

GREEDY = SamplingParams(temperature=0)
TEXT = tuple(range(100, 140))


def replayed(texts: list[Recorded], node_limit: int) -> Rounds:
    past = PastOutputs(None)
    rounds = Rounds(Catalogue(past), (PAST,), GREEDY, 1000, node_limit)
    for number, recorded in enumerate(texts):
        rounds.replay(number, recorded)
    past.close()
    return rounds


def test_a_text_that_nobody_wrote_before_takes_a_round_for_each_token() -> None:
    counts = replayed([Recorded((1, 2), TEXT, 0)], 8).counts
    assert (counts.tokens, counts.rounds, counts.nodes) == (40, 40, 0)


def test_a_text_that_was_written_before_is_copied_within_the_node_limit() -> None:
    counts = replayed([Recorded((1, 2), TEXT, 0), Recorded((1, 3), TEXT, 0)], 4).counts
    # The first token of the second text is the target's own; five tokens come in each further full round.
    assert counts.tokens == 80
    assert counts.rounds <= 40 + 1 + 14
    assert set(counts.accepted_by) == {PAST}
    figures = counts.figures()
    assert figures["accepted_per_node"] > 0.6
    assert figures["nodes_per_round"] <= 4
