"""A module an op: its cases, what each contender runs of them, whether its results are right, and its least work."""
