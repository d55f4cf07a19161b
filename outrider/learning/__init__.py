"""Learning from traffic, for whatever drafts: a drafter, or a head inside the verifier (Liu et al., 2023).

Top down: `learner` (a thread that runs lessons) -> `lesson` (a child process) -> `child_process` (its
bounds); `versions` (weights on the disk). `owner`, `cuts`, `passages`, `due`, `exams`, `judge` and `pace`
decide, and know nothing of processes, clocks or models. What is trained, how that is scored and how it is
swapped in belongs to the services.
"""
