"""What was computed once from pictures and captions, kept on disk and found again by what it was computed from."""
