"""`python -m verifier_service --model PATH`: runs a verifier as a process."""

import sys

from outrider.runtime.lifeline import die_with_told_parent


def main() -> None:
    """Ties itself to its parent before it imports what takes seconds."""
    die_with_told_parent(sys.argv[1:])
    from outrider.runtime.serve import run
    from outrider.runtime.settings import settings_or_exit
    from verifier_service.service import build
    from verifier_service.settings import VerifierSettings

    run("verifier", build, settings_or_exit(VerifierSettings))


if __name__ == "__main__":
    main()
