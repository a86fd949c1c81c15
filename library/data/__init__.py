"""Bucketing, batch plan, augmentation and loading: from the images of a dataset to the batch of a step."""
