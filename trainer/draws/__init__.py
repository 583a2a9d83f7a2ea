"""Random draws of the forward pass and the loss, as a function of the example."""
