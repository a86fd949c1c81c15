"""From datasets of images and captions to batches of each step."""
