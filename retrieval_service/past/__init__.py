"""What a tenant's sessions produced, kept to draft from."""
