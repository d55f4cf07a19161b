"""The verifiers and remote sources of this orchestrator: how they are found, judged and chosen."""
