"""The languages of the page: a catalogue each, and how its words come into templates and scripts."""
