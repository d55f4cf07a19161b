"""What learns in the shift of domain: a drafter, or a head of the target. Frozen and learning
students are asked alike for the chains that they draft.
"""

from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from drafter_service.learning.service import CHILD as DRAFTER_CHILD
from outrider.learning.passages import Passage
from outrider.lm.load.model import load_model
from training.online import agreed_places
from training.online_heads import HeadSchool, OnlineHead
from verifier_service.learning.service import CHILD as HEAD_CHILD

CHAIN = 4
"""Length of a drafter's chains. A head's are as long as the head looks ahead."""

M = TypeVar("M")


class Student(Protocol[M]):
    """Weights of which each version can be loaded, and asked for its chains."""

    child: str
    """The module that a lesson's process runs."""
    given: str
    """Folder of the weights to begin with."""
    target: str
    """The target that a lesson is told; empty: a lesson needs none."""

    def load(self, name: str) -> M:
        """The model of a folder."""
        ...

    def chains(self, model: M, passage: Passage) -> NDArray[np.int64]:
        """Right tokens of the chain from each place, before its first error: int64 [places]."""
        ...


class DrafterStudent:
    """A drafter, in float32 on the CPU."""

    child = DRAFTER_CHILD
    target = ""

    def __init__(self, given: str) -> None:
        self.given = given

    def load(self, name: str) -> PreTrainedModel:
        """The model of a folder."""
        return plain_model(name)

    def chains(self, model: PreTrainedModel, passage: Passage) -> NDArray[np.int64]:
        """Right tokens of the chain from each place, at most CHAIN: a chain is as right as its tokens are."""
        (agreed,) = agreed_places(model, [passage])
        return runs(agreed, CHAIN)


class HeadStudent:
    """A head of a target, in float32 on the CPU."""

    child = HEAD_CHILD

    def __init__(self, given: str, target: str) -> None:
        self.given = given
        self.target = target
        self._school = HeadSchool(target)

    def load(self, name: str) -> OnlineHead:
        """The head of a folder."""
        return self._school.load(name)

    def chains(self, model: OnlineHead, passage: Passage) -> NDArray[np.int64]:
        """Right tokens of the chain from each place, which the head drafts from its own estimates."""
        (found,) = self._school.right_tokens({0: model}, [passage])[0]
        return found


def plain_model(name: str) -> PreTrainedModel:
    """A whole model of a folder, in float32 on the CPU."""
    model = load_model(name, device="cpu", dtype="float32")
    model.set_attn_implementation("sdpa")
    return model


def runs(agreed: NDArray[np.bool_], most: int) -> NDArray[np.int64]:
    """From each place, the number of places in a row that agree, at most `most`."""
    found = np.zeros(len(agreed) + 1, dtype=np.int64)
    for place in reversed(range(len(agreed))):
        found[place] = min(most, found[place + 1] + 1) if agreed[place] else 0
    return found[:-1]


def rounds(chains: NDArray[np.int64]) -> int:
    """Rounds in which a target with these chains decodes the places: each adds one token to its chain's."""
    place = count = 0
    while place < len(chains):
        place, count = place + int(chains[place]) + 1, count + 1
    return count
