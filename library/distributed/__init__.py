"""How one run is spread over processes; nothing above this floor knows which strategy is used."""
