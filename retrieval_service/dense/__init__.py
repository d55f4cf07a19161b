"""Documents of a tenant that are found by what they are about, and copied from."""
