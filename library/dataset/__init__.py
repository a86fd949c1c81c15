"""What the images of a dataset are: the dataset file, where images and captions come from, and their inspection."""
