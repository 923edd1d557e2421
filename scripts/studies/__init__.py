"""What made the records in `results/`: trainings that are compared with each other."""
