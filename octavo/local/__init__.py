"""Running a whole cell on one machine: what `octavo up` and `octavo demo` do."""
