"""The checks of a model family: those of the contract test, which ``python -m library models --check`` runs as well."""
