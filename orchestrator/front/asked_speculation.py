"""Checks how a request asks to be drafted for; a mistake is refused with its field and its value."""

from orchestrator.admitted_request import Speculation
from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.copied_texts import CopiedTexts
from outrider.v1 import generation_pb2
from outrider.wire.criteria import criterion_from_wire, criterion_name
from outrider.wire.names import checked_corpora
from speculative.acceptance.criterion import Criterion
from speculative.acceptance.refusal import check_criterion
from speculative.errors import InvalidRequest
from speculative.params import SamplingParams
from speculative.policies.names import checked_policy

MAX_NODE_LIMIT = 256


def speculation_of(
    start: generation_pb2.GenerateStart, copied: CopiedTexts, params: SamplingParams, target: TargetModel
) -> Speculation:
    """The request's Speculation; `copied` has the texts that the answer may copy from.

    Raises InvalidRequest for a value out of its range, for a criterion that cannot hold, and where a request
    that turns drafting off says how to draft.
    """
    asked = start.speculation
    node_limit = asked.node_limit if asked.HasField("node_limit") else None
    if node_limit is not None and not 0 <= node_limit <= MAX_NODE_LIMIT:
        raise InvalidRequest(f"speculation.node_limit is {node_limit}; 0 to {MAX_NODE_LIMIT} are possible")
    enabled = asked.enabled if asked.HasField("enabled") else True
    if not enabled:
        _check_nothing_to_draft(asked)
    speculates = enabled and node_limit != 0
    return Speculation(
        speculates,
        tuple(dict.fromkeys(asked.sources)),
        node_limit,
        learn=asked.learn if asked.HasField("learn") else True,
        corpora=checked_corpora(asked.corpora),
        prediction=copied.prediction,
        references=copied.references,
        policy=_policy(asked),
        criterion=_criterion(start, params, target, speculates=speculates),
    )


def _policy(asked: generation_pb2.Speculation) -> str:
    try:
        return checked_policy(asked.policy)
    except InvalidRequest as error:
        raise InvalidRequest(f"speculation.{error}") from error


def _criterion(
    start: generation_pb2.GenerateStart, params: SamplingParams, target: TargetModel, *, speculates: bool
) -> Criterion | None:
    """The request's criterion. Raises InvalidRequest where it cannot hold, or no verifier has it."""
    asked = start.speculation
    if not asked.HasField("criterion"):
        return None
    criterion = criterion_from_wire(asked.criterion)
    check_criterion(criterion, params, grammar=start.HasField("grammar"), speculates=speculates)
    if (name := criterion_name(criterion)) not in target.criteria:
        known = ", ".join(target.criteria) or "none: its verifiers replay ids, or are older"
        raise InvalidRequest(f"criterion names {name!r}; model {target.name!r} has {known}")
    return criterion


def _check_nothing_to_draft(asked: generation_pb2.Speculation) -> None:
    """Raises InvalidRequest where drafting is off, but the request says how to draft.

    A node limit of 0 turns drafting off as well, and texts to copy from describe the answer, not the
    drafting.
    """
    says = ""
    if asked.sources:
        says = f"sources names {asked.sources[0]!r}"
    elif asked.corpora:
        says = f"corpora names {asked.corpora[0]!r}"
    elif asked.policy:
        says = f"policy is {asked.policy[:64]!r}"
    elif asked.node_limit:
        says = f"node_limit is {asked.node_limit}"
    if says:
        raise InvalidRequest(
            f"speculation.{says}, but speculation.enabled is false: leave one of the two out"
        )
