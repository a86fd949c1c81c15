"""Files of a run on disk: checkpoint directories, the lock on the output name, uploads to the Hugging Face hub."""
