"""Workers, which run the jobs of one model: on a thread, or in simulated time (`simulated_worker`)."""
