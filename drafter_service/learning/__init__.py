"""A drafter that learns from the traffic it drafts for (`outrider.learning`).

`collector` keeps passages of what verifiers say, `worker` swaps weights between two passes, `child` is what a
lesson's process runs, `service` puts a learning drafter together.
"""
