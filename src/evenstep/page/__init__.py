"""The page of a run: a process beside it, which reads its segment when someone looks."""
