"""Workers: owned threads that run the jobs of one model, and their stand-in in simulated time."""
