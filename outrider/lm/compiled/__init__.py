"""Passes compiled ahead of time, on the CPU in float32: what is compiled, by whom, and how it runs."""
