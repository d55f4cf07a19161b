"""`python -m verifier_service --model PATH`: a verifier as a process, or one rank of it under torchrun."""

import contextlib
import os
import sys

from outrider.runtime.lifeline import die_with_parent, die_with_parent_from_flags


def main() -> None:
    """Ties the process to its parent first: importing the rest takes seconds."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
    die_with_parent_from_flags(sys.argv[1:])
    if os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0":
        # Only the first rank may write to standard output.
        os.dup2(2, 1)
    from outrider.runtime.settings import settings_or_exit
    from verifier_service.settings import VerifierSettings

    settings = settings_or_exit(VerifierSettings)
    from outrider.runtime.serve import run
    from speculative.errors import InvalidRequest
    from verifier_service.parallel import rank_from_environment, run_follower
    from verifier_service.service import build

    rank = None
    with contextlib.suppress(InvalidRequest):  # `build` reports the error
        rank = rank_from_environment(settings)
    if rank is not None and rank.rank > 0:
        run_follower(settings, rank)
    run("verifier", build, settings)


if __name__ == "__main__":
    main()
