"""The data loader: bucketing, batch plan, augmentation and loading, from the images of a dataset to a step's batch."""
