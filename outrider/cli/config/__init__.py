"""`outrider config`: checks a configuration file, and shows a role's settings."""
