"""From folders of pictures and captions to batches."""
