"""What is trained inside a frozen model, and the files it is kept in."""
