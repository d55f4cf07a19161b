"""Whether a criterion can hold for a request; asked at the front door and again at the verifier."""

from speculative.acceptance.criterion import Criterion
from speculative.acceptance.typical import Typical
from speculative.errors import InvalidRequest
from speculative.params import GREEDY_BELOW, SamplingParams


def check_criterion(criterion: Criterion, params: SamplingParams, *, grammar: bool, speculates: bool) -> None:
    """Raises InvalidRequest where the request contradicts the criterion.

    Args:
        criterion: the request's criterion.
        params: its sampling parameters.
        grammar: whether it has a grammar.
        speculates: whether it takes drafts at all.
    """
    if not speculates:
        raise InvalidRequest(
            "criterion says how drafts are accepted, but the request takes none: it turns speculation off, "
            "sets its nodes to 0, or has its prompt scored; leave criterion out"
        )
    if grammar:
        raise InvalidRequest(
            "criterion is given beside a grammar, which only the path match keeps: leave one of the two out"
        )
    if params.greedy and isinstance(criterion, Typical):
        raise InvalidRequest(
            f"criterion.typical needs a temperature of at least {GREEDY_BELOW:g}, and it is "
            f"{params.temperature:g}; name specdec, or leave criterion out"
        )
