"""`python -m orchestrator`: the orchestrator as a process."""

from orchestrator.service import build
from orchestrator.settings import OrchestratorSettings
from outrider.runtime.serve import run
from outrider.runtime.settings import settings_or_exit

if __name__ == "__main__":
    run("orchestrator", build, settings_or_exit(OrchestratorSettings))
