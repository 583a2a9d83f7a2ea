"""Which example stands where, which random numbers it draws, and how it gets to the device."""
