"""The island: a full inner loop that joins a run."""
