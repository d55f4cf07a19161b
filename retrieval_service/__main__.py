"""`python -m retrieval_service`: runs a retrieval worker as a process."""

import sys

from outrider.runtime.lifeline import die_with_parent_from_flags


def main() -> None:
    """Ties the process to its parent's life before the slow imports, then serves."""
    die_with_parent_from_flags(sys.argv[1:])
    from outrider.runtime.serve import run
    from outrider.runtime.settings import settings_or_exit
    from retrieval_service.service import build
    from retrieval_service.settings import RetrievalSettings

    run("retrieval", build, settings_or_exit(RetrievalSettings))


if __name__ == "__main__":
    main()
