"""Code that a service has compiled beside its serving, and the folder that keeps it. Knows no torch."""
