"""Which workers are not used, without any connection."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.fleet.compatibility import (
    DescribedVerifier,
    contract_refusal,
    elect_identities,
    incompatible_sources,
    incompatible_verifiers,
    message_refusal,
)
from orchestrator.fleet.target_model import ModelIdentity
from outrider.wire.channel import least_message_mb
from outrider.wire.workers import CONTRACT

OURS = ModelIdentity("d" * 64, 96, "a1")
OTHERS = OURS._replace(weights_digest="b2")
UNKNOWN = OURS._replace(weights_digest="")
FOREIGN = OURS._replace(tokenizer_digest="e" * 64)


def described(*identities: ModelIdentity, model: str = "m", up: bool = True) -> list[DescribedVerifier]:
    return [DescribedVerifier(f"v{number}:1", model, it, up) for number, it in enumerate(identities)]


def refused(verifiers: Sequence[DescribedVerifier], before: ModelIdentity = OURS) -> dict[str, str]:
    chosen = elect_identities(verifiers, {"m": before})
    return {address: refusal.kind for address, refusal in incompatible_verifiers(verifiers, chosen).items()}


def test_verifiers_that_are_one_model_are_all_used() -> None:
    assert refused(described(OURS, OURS)) == {}


def test_those_are_used_that_most_agree_with() -> None:
    assert refused(described(OTHERS, OURS, OTHERS)) == {"v1:1": "model"}


def test_of_as_many_those_stay_that_were_used_before() -> None:
    assert refused(described(OTHERS, OURS)) == {"v0:1": "model"}
    assert refused(described(OURS, OTHERS), before=OTHERS) == {"v0:1": "model"}


def test_one_out_of_reach_has_no_vote() -> None:
    away = [DescribedVerifier("a:1", "m", OTHERS, False), DescribedVerifier("b:1", "m", OTHERS, False)]
    assert refused([*away, DescribedVerifier("c:1", "m", OURS, True)]) == {"a:1": "model", "b:1": "model"}


def test_with_nobody_in_reach_a_name_stands_for_what_it_did() -> None:
    assert elect_identities(described(OTHERS, up=False), {"m": OURS}) == {"m": OURS}
    assert elect_identities(described(OTHERS, up=False), {}) == {"m": OTHERS}


def test_one_that_does_not_know_its_weights_is_as_any_and_decides_nothing() -> None:
    assert refused(described(UNKNOWN, OURS, OTHERS)) == {"v2:1": "model"}
    assert refused(described(UNKNOWN, UNKNOWN)) == {}


def test_another_tokenizer_is_named_as_such() -> None:
    verifiers = described(OURS, OURS, FOREIGN)
    assert refused(verifiers) == {"v2:1": "tokenizer"}
    (refusal,) = incompatible_verifiers(verifiers, elect_identities(verifiers, {})).values()
    assert "eeeeeeeeeeee" in refusal.why
    assert "dddddddddddd" in refusal.why


def test_models_of_other_names_are_no_concern() -> None:
    verifiers = [*described(OURS), DescribedVerifier("x:1", "other", OTHERS, True)]
    assert incompatible_verifiers(verifiers, elect_identities(verifiers, {})) == {}


identities = st.sampled_from([OURS, OTHERS, UNKNOWN, FOREIGN])


@settings(deadline=None)
@given(st.lists(st.tuples(identities, st.booleans()), min_size=1), st.none() | identities)
def test_any_used_verifier_could_continue_any_others_sessions(
    them: list[tuple[ModelIdentity, bool]], before: ModelIdentity | None
) -> None:
    verifiers = [DescribedVerifier(f"v{number}", "m", it, up) for number, (it, up) in enumerate(them)]
    chosen = elect_identities(verifiers, {} if before is None else {"m": before})
    out = incompatible_verifiers(verifiers, chosen)
    used = [it.identity for it in verifiers if it.reachable and it.address not in out]
    assert all(one.agrees(other) for one in used for other in used)
    assert used or not any(up for _, up in them)


def test_another_contract_is_refused_and_none_is_the_first() -> None:
    assert contract_refusal(CONTRACT) is None
    assert contract_refusal(0) is None
    refusal = contract_refusal(CONTRACT + 1)
    assert refusal is not None
    assert (refusal.kind, str(CONTRACT + 1) in refusal.why) == ("contract", True)


def test_a_source_fits_where_one_target_has_its_tokenizer_or_it_has_none() -> None:
    targets = [OURS, FOREIGN]
    assert incompatible_sources({"a:1": "d" * 64, "b:1": "e" * 64, "c:1": ""}, targets) == {}
    assert [(a, r.kind) for a, r in incompatible_sources({"a:1": "f" * 64}, targets).items()] == [
        ("a:1", "tokenizer")
    ]
    assert incompatible_sources({"a:1": "f" * 64}, []) == {}, "whom it fits may yet come"


@pytest.mark.parametrize(
    ("context", "vocabulary"), [(2_048, 4_096), (131_072, 128_256), (1_354_410, 128_256)]
)
def test_a_verifier_is_used_with_the_least_bound_that_its_requests_need_and_refused_below(
    context: int, vocabulary: int
) -> None:
    least_mb = least_message_mb(context, vocabulary)
    assert message_refusal(context, vocabulary, least_mb) is None
    refusal = message_refusal(context, vocabulary, least_mb - 1)
    assert refusal is not None
    assert refusal.kind == "message"
    assert f"context of {context} tokens take up to {least_mb} MiB" in refusal.why
    assert f"max_message_mb = {least_mb - 1}: give {least_mb} or more" in refusal.why
