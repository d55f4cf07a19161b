"""Heads: small networks that draft from the target's hidden states, in the layouts that are published.

The modules compute drafts and are trained; they know nothing of sessions, trees, caches or services.
"""
