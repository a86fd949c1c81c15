"""Processes: accelerator, launcher settings, rendezvous, communicator, watchdog."""
