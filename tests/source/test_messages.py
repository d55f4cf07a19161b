"""Messages of verifiers as events."""

import pytest

from outrider.source.events import Follow, LeastSurvival, MalformedFollow, Progress, SessionEnded
from outrider.source.messages import events_from_wire
from outrider.v1 import common_pb2, draft_source_pb2


@pytest.mark.parametrize(("sent", "survival"), [(0, 0.0), (51, 0.2), (255, 1.0), (9999, 1.0)], ids=str)
def test_what_nodes_need_comes_before_what_they_are_needed_for(sent: int, survival: float) -> None:
    progress = draft_source_pb2.Progress(alias=3, position=5, ids=[8], prefix_hash=1)
    message = draft_source_pb2.AttachRequest(progress=[progress], end=[3], least_survival=sent)
    least, *others = events_from_wire(message, 7, model="m", tokenizer_digest="")
    assert least == LeastSurvival(7, pytest.approx(survival))
    assert others == [Progress(7, 3, 5, (8,), 1), SessionEnded(7, 3)]


def test_a_follow_carries_the_policy_and_a_wrong_one_is_refused_with_the_names() -> None:
    key = common_pb2.SessionKey(session="s")
    follow = draft_source_pb2.Follow(
        alias=2, key=key, ids=[1], prompt_length=1, vocabulary_size=9, policy="fixed:2"
    )
    _, event = events_from_wire(
        draft_source_pb2.AttachRequest(follow=[follow]), 7, model="m", tokenizer_digest=""
    )
    assert isinstance(event, Follow)
    assert event.request.policy == "fixed:2"
    follow.policy = "best"
    _, refused = events_from_wire(
        draft_source_pb2.AttachRequest(follow=[follow]), 7, model="m", tokenizer_digest=""
    )
    assert isinstance(refused, MalformedFollow)
    assert "'best'; give one of survival, fixed" in refused.why
