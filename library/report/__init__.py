"""The HTML report and the preview grid of a run."""
