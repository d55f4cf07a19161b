"""The service that decodes: it owns the committed prefix of its sessions and verifies what others draft."""
