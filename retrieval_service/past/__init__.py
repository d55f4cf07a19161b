"""Past outputs of tenants' sessions, kept to draft from: bounded, current, and lasting over restarts."""
