"""Stands in for clients' devices as the draft source `edge` of verifiers.

Bottom up: `account` (what one choice's device may send) -> `source` (DraftSource, towards verifiers) ->
`devices` (every request's device, towards the fronts).
"""
