"""Dense references: documents found by what they are about, and copied from."""
