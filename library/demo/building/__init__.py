"""How the built-in model was made; nothing here is needed for using it."""
