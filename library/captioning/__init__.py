"""Captions of image folders: reading and writing them, models that write them, and edits of tags."""
