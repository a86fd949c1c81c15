"""Mathematics of diffusion: noise processes, timestep sampling, losses and weightings; pure functions on tensors."""
