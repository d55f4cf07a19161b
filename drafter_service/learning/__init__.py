"""A drafter that learns from the traffic it drafts for (online speculative decoding, Liu et al., 2023).

Top down: `learner` (a thread that runs lessons) -> `lesson` (a child process) -> `child` (what it runs);
`worker` (collects passages and swaps weights between two passes); `versions` (weights on the disk). `owner`,
`passages`, `collector`, `judge` and `pace` decide, and know nothing of processes, clocks or models.
"""
