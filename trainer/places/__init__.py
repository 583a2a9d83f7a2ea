"""Places beyond the machine: buckets, Ray, MPI, and the services that follow a run."""
