"""The HTML report of a run: charts, previews, metrics."""
