"""What a session tells a target on a device ahead: enough to choose its tokens from digests."""

from core_driver import GREEDY, CoreDriver

from speculative.logprobs import Logprobs
from speculative.params import SamplingParams
from speculative.tree import TokenTree
from verifier_service.engine.step import Scouts, StepRows

TREE = TokenTree((5, 6, 7), (-1, 0, -1), (0.9, 0.8, 0.1), (1, 1, 1))
ROWS = StepRows((3,), TREE, True, 3, Scouts((8, 9), (1, -1)))


def test_each_wanted_row_has_the_position_of_its_token() -> None:
    session = CoreDriver().open((1, 2, 3), 20, SamplingParams(temperature=0.8, top_p=0.9), seed=7)
    asks = session.asks(ROWS)
    assert len(asks) == ROWS.wanted == 6
    assert [ask.position for ask in asks] == [3, 4, 5, 4, 6, 4]
    assert {(ask.seed, ask.temperature, ask.nucleus, ask.named) for ask in asks} == {(7, 0.8, True, ())}


def test_ids_whose_logits_the_request_changes_are_named() -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.2, logit_bias=((20, 1.0),), min_tokens=2, stop_ids=(21,)
    )
    (first, *_) = CoreDriver().open((1, 2, 3), 20, params).asks(ROWS)
    assert first.named == (1, 2, 3, 5, 6, 7, 8, 9, 20, 21)
    assert first.temperature == 0.0


def test_as_many_of_the_likeliest_are_asked_for_as_the_request_and_its_sources_need() -> None:
    driver = CoreDriver()
    assert driver.open((1, 2, 3), 20, GREEDY).asks(ROWS)[0].top == 0
    cut = driver.open((1, 2, 3), 20, SamplingParams(top_k=5), logprobs=Logprobs(3))
    assert cut.asks(ROWS)[0].top == 5
    reported = driver.open((1, 2, 3), 20, SamplingParams(top_k=2), logprobs=Logprobs(3), sources=("lookup",))
    assert reported.asks(ROWS)[0].top == 3
    reported.sources.want_tops(1, 9)
    assert reported.asks(ROWS)[0].top == 9


def test_a_request_for_log_probabilities_asks_for_a_list_with_which_their_sum_comes() -> None:
    session = CoreDriver().open((1, 2, 3), 20, GREEDY, logprobs=Logprobs(0))
    assert session.asks(ROWS)[0].top == 1
