"""Tables of the keys of each program's files: what becomes of each."""
