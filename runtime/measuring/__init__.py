"""What `bench` and `doctor` have in common: times of forward passes, the machine, and reports for an issue."""
