"""`python -m verifier_service --model PATH`: a verifier as a process, or one rank of it under torchrun."""

import contextlib
import os
import sys

from outrider.runtime.lifeline import die_with_parent, die_with_told_parent


def main() -> None:
    """Ties itself to its parent before it imports what takes seconds."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
    die_with_told_parent(sys.argv[1:])
    if os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0":
        # Only the first rank speaks on standard output.
        os.dup2(2, 1)
    from outrider.runtime.settings import settings_or_exit
    from verifier_service.settings import VerifierSettings

    settings = settings_or_exit(VerifierSettings)
    from outrider.runtime.serve import run
    from speculative.errors import InvalidRequest
    from verifier_service.ranks import place_of, run_follower
    from verifier_service.service import build

    place = None
    with contextlib.suppress(InvalidRequest):  # `build` tells it
        place = place_of(settings)
    if place is not None and place.rank > 0:
        run_follower(settings, place)
    run("verifier", build, settings)


if __name__ == "__main__":
    main()
