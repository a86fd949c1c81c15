"""The built-in demo model and its images."""
