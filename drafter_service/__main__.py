"""`python -m drafter_service --model PATH`: runs a drafter as a process."""

import sys

from outrider.runtime.lifeline import die_with_parent_from_flags


def main() -> None:
    """Ties the process to its parent's life before the slow imports, then serves."""
    die_with_parent_from_flags(sys.argv[1:])
    from drafter_service.service import build
    from drafter_service.settings import DrafterSettings
    from outrider.runtime.serve import run
    from outrider.runtime.settings import settings_or_exit

    run("drafter", build, settings_or_exit(DrafterSettings))


if __name__ == "__main__":
    main()
