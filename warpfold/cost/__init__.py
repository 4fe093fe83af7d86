"""Memory and time of jobs, estimated before they run, and the choice of a plan."""
