"""The runtime over scripted models in simulated time."""
