"""`python -m orchestrator`: the orchestrator as a process."""

import sys

from outrider.runtime.lifeline import die_with_told_parent


def main() -> None:
    """Ties itself to its parent before it imports what takes seconds."""
    die_with_told_parent(sys.argv[1:])
    from orchestrator.front.tls import front
    from orchestrator.service import build
    from orchestrator.settings import OrchestratorSettings
    from outrider.runtime.serve import run
    from outrider.runtime.settings import settings_or_exit

    run("orchestrator", build, settings_or_exit(OrchestratorSettings), front)


if __name__ == "__main__":
    main()
