"""`python -m orchestrator`: the orchestrator as a process."""

import sys

from outrider.runtime.lifeline import die_with_parent_from_flags


def main() -> None:
    """Run the orchestrator; tie it to its parent first, since imports take seconds."""
    die_with_parent_from_flags(sys.argv[1:])
    from orchestrator.front.tls import grpc_listening
    from orchestrator.service import build
    from orchestrator.settings import OrchestratorSettings
    from outrider.runtime.serve import run
    from outrider.runtime.settings import settings_or_exit

    run("orchestrator", build, settings_or_exit(OrchestratorSettings), grpc_listening)


if __name__ == "__main__":
    main()
