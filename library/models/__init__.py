"""Model families, and loading, detecting and sampling their diffusers pipelines."""
