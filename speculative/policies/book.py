"""The policies of a worker's sessions, and what they learnt together."""

from speculative.implementations import load_implementation
from speculative.policies.names import POLICIES, policy_choice
from speculative.policies.policy import DraftLimits, DraftPolicy

_TABLE = {name: kind.where for name, kind in POLICIES.items()}


class PolicyBook:
    """Makes a policy for each session; policies of one name share what they learnt.

    Args:
        default: policy of sessions that name none, as NAME or NAME:NUMBER.
        bounds: bounds of the service, which no policy exceeds.

    Raises:
        InvalidRequest: there is no such policy.
    """

    def __init__(self, default: str, bounds: DraftLimits) -> None:
        self._default = policy_choice(default)
        self._bounds = bounds
        self._learnt: dict[tuple[str, str], object] = {}

    def open(self, text: str = "", source: str = "") -> DraftPolicy:
        """The policy of a new session for one source.

        Args:
            text: what the session's request names; empty: the service's own.
            source: name of the source, where the worker has several; each has learnt for itself.

        Raises:
            InvalidRequest: there is no such policy.
        """
        choice = policy_choice(text) if text else self._default
        kind = load_implementation(_TABLE, choice.name)
        key = (choice.name, source)
        if key not in self._learnt:
            self._learnt[key] = kind.learnt_anew(self._bounds)
        policy: DraftPolicy = kind(self._bounds, choice.value, self._learnt[key])
        return policy
