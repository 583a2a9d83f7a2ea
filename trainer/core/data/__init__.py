"""Sample order, random numbers keyed by example, and loaders that feed the device."""
