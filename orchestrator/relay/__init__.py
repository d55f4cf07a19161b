"""What becomes of an admitted request: opened on a verifier, read, moved where that is lost, ended."""
