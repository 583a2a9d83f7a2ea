"""The verb `plan`: what a run needs on many ranks, computed on one process before it starts."""
