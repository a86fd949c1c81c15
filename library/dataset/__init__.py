"""The dataset on disk: the dataset file, the discovery of images, captions and masks, and their inspection."""
