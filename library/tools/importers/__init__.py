"""Readers of the configuration files of other training programs; each turns its keys into our options and datasets."""
