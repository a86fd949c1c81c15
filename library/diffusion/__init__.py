"""Mathematics of diffusion: noise processes, timestep densities, losses; pure functions on tensors."""
