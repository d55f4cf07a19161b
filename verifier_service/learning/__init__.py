"""A head inside the verifier that learns from the traffic it drafts for (`outrider.learning`).

`collector` keeps what sessions committed, `child` is what a lesson's process runs, `service` puts a learning
head together, and has the engine swap it.
"""
