"""What a client has of an answer, where it names it by number and hash instead of sending it.

The record of tokens need not reach that far: then the client is asked for the ids, which it has.
"""

from collections.abc import Awaitable, Callable, Sequence

from outrider.v1 import generation_pb2
from outrider.wire.codec import MAX_CHOICES, SessionKey
from speculative.errors import IdsNeeded, InvalidRequest
from speculative.hashing import prefix_hash

RecordOf = Callable[[SessionKey], Awaitable[Sequence[int]]]
"""Generated ids that are recorded of a choice; none where nothing is."""


async def fill_have(
    start: generation_pb2.GenerateStart, key: SessionKey, prompt: Sequence[int], record_of: RecordOf
) -> None:
    """Puts the ids into every `have` that names them by count and hash.

    Raises InvalidRequest where one does both or there are more than choices can be, IdsNeeded where the
    record does not have them.
    """
    for name, given in (("have", start.have), ("ended", start.ended)):
        if len(given) > MAX_CHOICES:
            raise InvalidRequest(
                f"{name} has {len(given)} entries; a request has at most {MAX_CHOICES} choices"
            )
    for choice, have in enumerate(start.have):
        if not have.count or choice in start.ended:
            continue
        if have.ids:
            raise InvalidRequest(f"have[{choice}] has both ids and a count; give one of them")
        recorded = tuple(await record_of(key._replace(choice=choice)))[: have.count]
        if len(recorded) < have.count or prefix_hash([*prompt, *recorded]) != have.prefix_hash:
            raise IdsNeeded(
                f"the first {have.count} ids of choice {choice} of session {key.session!r} are not on record "
                "here as the request has them; ask again with the ids in `have`"
            )
        have.ids.extend(recorded)
