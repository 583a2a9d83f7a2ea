"""Import this to import what each run does, before processes are forked."""

from harness.training import warm_up

warm_up()
